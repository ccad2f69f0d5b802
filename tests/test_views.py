from __future__ import annotations

import pytest
import torch

from passlora.method.views import class_scores, nodes, rotate


def test_rows_are_the_rotations_of_each_image_in_turn():
    images = torch.arange(2 * 3 * 5 * 5.0).view(2, 3, 5, 5)
    rows = rotate(images, 4)
    assert rows.shape == (8, 3, 5, 5)
    for i in range(2):
        for v in range(4):
            turned = images[i]
            for _ in range(v):  # 90 degrees counter-clockwise, by hand
                turned = turned.transpose(-2, -1).flip(-2)
            assert torch.equal(rows[4 * i + v], turned)
    assert torch.equal(rotate(images, 1), images)


def test_rotation_after_the_resize_equals_resize_after_the_rotation():
    images = torch.rand(2, 3, 8, 8)
    resize = lambda x: torch.nn.functional.interpolate(x, (20, 20), mode="bilinear")
    assert torch.allclose(rotate(resize(images), 4), resize(rotate(images, 4)), atol=1e-6)


def test_nodes_are_interleaved():
    assert nodes(torch.tensor([2, 0]), 4).tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    assert nodes(torch.tensor([2, 0]), 1).tolist() == [2, 0]


def brute_force(logits, mode, k):
    scores = torch.zeros(len(logits) // 4, k)
    for i in range(len(scores)):
        for c in range(k):
            if mode == "multiview":
                scores[i, c] = sum(logits[4 * i + v, 4 * c + v] for v in range(4)) / 4
            elif mode == "vanilla":
                scores[i, c] = sum(logits[4 * i + v, 4 * c] for v in range(4)) / 4
            else:
                scores[i, c] = logits[4 * i, 4 * c]
    return scores


@pytest.mark.parametrize("mode", ["multiview", "single", "vanilla"])
def test_inference_modes_against_loops(mode):
    logits = torch.randn(12, 20)
    assert torch.allclose(class_scores(logits, 4, mode), brute_force(logits, mode, 5), atol=1e-6)


def test_an_images_views_are_scored_on_their_own_nodes():
    """A classifier that is right about class and view of every row wins only if view v is read on node 4c+v."""
    classes = torch.tensor([2, 0, 1])
    logits = torch.nn.functional.one_hot(nodes(classes, 4), 12).float()
    assert class_scores(logits, 4, "multiview").argmax(1).tolist() == [2, 0, 1]
    assert class_scores(logits, 4, "multiview").max(1).values.tolist() == [1, 1, 1]
    assert class_scores(logits, 4, "vanilla").max(1).values.tolist() == [0.25] * 3


def test_one_view_is_the_plain_classifier():
    logits = torch.randn(3, 5)
    assert torch.equal(class_scores(logits, 1, "single"), logits)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="unknown inference mode"):
        class_scores(torch.zeros(4, 4), 4, "best")
