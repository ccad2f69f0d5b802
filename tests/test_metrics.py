from __future__ import annotations

import numpy as np
import pytest
import torch

from passlora.data.scenario import Scenario
from passlora.display.tables import mistakes
from passlora.training import metrics
from passlora.training.evaluation import CALIBRATION_BINS, Evaluation, tally

# Worked by hand: three tasks. Forgetting after task 3: task 1: max(90, 80) - 70 = 20; task 2: 60 - 65 = -5.
MATRIX = [[90.0, None, None], [80.0, 60.0, None], [70.0, 65.0, 50.0]]


def test_forgetting_by_hand():
    assert metrics.forgetting(MATRIX) == pytest.approx((20 - 5) / 2)
    assert metrics.forgetting(MATRIX, 1) == pytest.approx(10)
    assert metrics.forgetting(MATRIX, 0) == 0


def test_forgetting_takes_the_best_earlier_stage():
    matrix = [[50.0, None, None], [90.0, 40.0, None], [60.0, 40.0, 10.0]]
    assert metrics.forgetting(matrix) == pytest.approx((90 - 60 + 0) / 2)


def test_summary_by_hand():
    got = metrics.summary(MATRIX, [90.0, 72.0, 60.0])
    assert (got["last"], got["avg"], got["forgetting"]) == (60.0, pytest.approx(74.0), pytest.approx(7.5))
    assert got["accuracy_matrix"] == MATRIX


def test_the_newest_task_by_hand():
    assert metrics.newest(MATRIX) == pytest.approx((60 + 50) / 2)
    assert metrics.newest([[80.0]]) == 80, "one task: there is no other"


def test_bias_by_hand():
    """Two old classes, one new: 3 of 8 old images are called new, 1 of 4 new ones old."""
    made = Scenario(tuple(range(3)), (2, 1))
    confusion = np.array([[2, 1, 1], [0, 2, 2], [1, 0, 3]])
    assert metrics.bias(confusion, made, 1) == pytest.approx([100 * 3 / 8, 25])
    assert metrics.bias(confusion[:2, :2], made, 0) is None


def test_trimmed_results_know_nothing_of_later_tasks():
    part = metrics.summary(MATRIX, [90.0, 72.0, 60.0])
    results = {**part, "inference": "single", "inference_modes": {"single": part}, "ece": 5.0, "calibration": [[1]]}
    results |= {"bias": [None, [1, 2], [3, 4]], "train_seconds": [1, 2, 3], "finished": True, "compare": {}}
    trimmed = metrics.trim(results, 2)
    assert trimmed["bias"] == [None, [1, 2]] and trimmed["train_seconds"] == [1, 2] and trimmed["last"] == 72
    assert "ece" not in trimmed and "calibration" not in trimmed and len(results["bias"]) == 3


def test_tasks_of_unequal_sizes():
    """Grouping follows the scenario; it never assumes tasks of ten."""
    made = Scenario(tuple(range(4)), (1, 3))
    confusion = np.array([[3, 1, 0, 0], [0, 2, 0, 2], [1, 0, 1, 0], [0, 0, 0, 2]])
    assert metrics.matrix_row(confusion, made, 1) == [75.0, pytest.approx(100 * 5 / 8)]
    assert metrics.accuracy(confusion, range(4)) == pytest.approx(100 * 8 / 12)
    assert metrics.matrix_row(confusion[:1, :1], made, 0) == [100.0, None]


def test_the_calibration_error_by_hand():
    """Two bins in use: 4 images at 0.9 confidence, half of them right; 1 image at 0.5, right."""
    bins = np.zeros((15, 3))
    bins[13] = [4, 2, 3.6]
    bins[7] = [1, 1, 0.5]
    evaluation = Evaluation(np.eye(2), bins)
    assert evaluation.calibration_error == pytest.approx(100 * (4 / 5 * 0.4 + 1 / 5 * 0.5))


def test_counts_of_batches_by_hand():
    """Three images in two batches: right at 0.88, wrong at 0.73, right at exactly 1/2 of two classes."""
    confusion, bins = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(CALIBRATION_BINS, 3)
    tally(torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]), confusion, bins)
    tally(torch.tensor([[0.0, 0.0]]), torch.tensor([0]), confusion, bins)
    assert confusion.tolist() == [[2, 0], [1, 0]]
    sure, unsure = 1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-1))
    expected = np.zeros((CALIBRATION_BINS, 3))
    expected[13], expected[10], expected[7] = [1, 1, sure], [1, 0, unsure], [1, 1, 0.5]
    np.testing.assert_allclose(bins, expected, atol=1e-6)
    found = Evaluation(confusion.numpy(), bins.double().numpy())
    assert found.accuracy == pytest.approx(200 / 3) and found.tested_classes == 2
    assert found.calibration_error == pytest.approx(100 / 3 * (1 - sure + unsure + 0.5), rel=1e-5)


def test_mean_and_deviation_over_runs():
    runs = [metrics.summary([[100.0, None], [v, v]], [100.0, v]) for v in (40.0, 60.0)]
    got = metrics.over_runs(runs)
    assert got["last"] == 50 and got["std"]["last"] == pytest.approx(14.1421356)
    assert got["stage_accuracy"] == [100, 50] and got["std"]["stage_accuracy"][0] == 0
    assert got["accuracy_matrix"] == [[100, None], [50, 50]]
    assert metrics.over_runs(runs[:1])["std"]["last"] == 0


def test_mistakes_name_the_weakest_classes_and_the_commonest_confusions():
    confusion = np.array([[8, 2, 0], [0, 10, 0], [3, 1, 4]])
    assert mistakes(["cat", "dog", "owl"], confusion) == (
        "weakest: owl 50% of 8, cat 80% of 10\nconfused: owl as cat (3), cat as dog (2), owl as dog (1)"
    )
    assert mistakes(["cat", "dog", "owl"], confusion, most=1) == "weakest: owl 50% of 8\nconfused: owl as cat (3)"
    assert mistakes(["a", "b"], np.diag([3, 0])) == "", "a class without images is no weak one"
