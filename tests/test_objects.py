"""Data that a program holds, instead of a path."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from quick import SMALL, write_digits
from quick import quick as quick
from sklearn.datasets import load_digits

from passlora import PassLora, PassloraError

SOURCE = load_digits()
DIGITS = (0, 1, 2)


def pairs(start=0, count=6, digits=DIGITS, label=str):
    found = []
    for digit in digits:
        for row in np.flatnonzero(SOURCE.target == digit)[start : start + count]:
            found.append((Image.fromarray((SOURCE.images[row] * 15.9).astype(np.uint8)), label(digit)))
    return found


class Torch(torch.utils.data.Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, row):
        image, label = self.pairs[row]
        return torch.from_numpy(np.array(image))[None] / 255, torch.tensor(int(label))


class Vision(Torch):
    """As torchvision's datasets: names apart, and labels without opening an image."""

    def __init__(self, pairs):
        super().__init__(pairs)
        self.classes, self.targets = ["0", "1", "2"], [int(label) for _, label in pairs]


def as_datasets(pairs):
    names = datasets.ClassLabel(names=["0", "1", "2"])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    table = {"image": [image for image, _ in pairs], "label": [int(label) for _, label in pairs]}
    return datasets.Dataset.from_dict(table, features=features)


FORMS = {
    "pairs": lambda data: data,
    "a generator": lambda data: iter(data),
    "arrays": lambda data: [(np.asarray(image), int(label)) for image, label in data],
    "torch": Torch,
    "a loader": lambda data: torch.utils.data.DataLoader(Torch(data), batch_size=4, shuffle=True),
    "torchvision's": Vision,
    "datasets": as_datasets,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The same images as files."""
    root = tmp_path_factory.mktemp("digits")
    write_digits(root / "train", DIGITS, 6, name="{}")
    write_digits(root / "test", DIGITS, 5, start=50, name="{}")
    model = PassLora.create(**SMALL, lift_width=30)
    lesson = model.learn(root)
    return model.learner.network.classifier.state_dict(), lesson.all_after, root


USUAL = ("pairs", "a loader", "datasets")


@pytest.mark.parametrize("form", [f if f in USUAL else pytest.param(f, marks=pytest.mark.slow) for f in FORMS])
def test_any_form_teaches_what_files_do(form, expected):
    model = PassLora.create(**SMALL, lift_width=30)
    make = FORMS[form]
    lesson = model.learn({"train": make(pairs()), "test": make(pairs(50, 5))})
    state, accuracy, _ = expected
    assert model.classes == ["0", "1", "2"] and lesson.all_after == pytest.approx(accuracy)
    for name, tensor in model.learner.network.classifier.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-4, atol=1e-5)
    assert model.evaluate(make(pairs(50, 5))).accuracy == pytest.approx(accuracy)
    assert model.tasks[0].dataset is None


def test_a_whole_dict_of_datasets(expected):
    model = PassLora.create(**SMALL, lift_width=30)
    both = datasets.DatasetDict(train=as_datasets(pairs()), test=as_datasets(pairs(50, 5)))
    assert model.learn(both).all_after == pytest.approx(expected[1])


def test_the_next_lesson_may_be_of_another_form(expected, tmp_path):
    model = PassLora.create(**SMALL, lift_width=30)
    model.learn(pairs(digits=(0, 1)))
    lesson = model.learn({"train": pairs(digits=(2,)), "test": expected[2] and pairs(50, 5)})
    assert lesson.new_classes == ["2"] and lesson.old_after is not None
    model.save_pretrained(tmp_path / "m")
    assert PassLora.from_pretrained(tmp_path / "m").classes == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "is empty"),
        ({}, "is empty"),
        (7, "cannot learn from a int"),
        ([Image.new("L", (8, 8))], "item 0 of the data given is no pair"),
        ([(Image.new("L", (8, 8)), 1.5)], "a label is a name or a whole number"),
        ({"test": [(Image.new("L", (8, 8)), "a")]}, "has no 'train'"),
        ([(torch.randn(3, 8, 8), "a"), (torch.randn(3, 8, 8), "b")], "cannot read image 0 of the data given"),
        ({"train": [(Image.new("L", (8, 8)), "a")], "test": [(Image.new("L", (8, 8)), "b")]}, "the label 'b' is none"),
    ],
)
def test_what_is_no_data_is_one_sentence(data, words):
    with pytest.raises(PassloraError, match=words):
        PassLora.create(**SMALL, lift_width=20).learn(data)


def test_a_part_of_a_dataset_is_that_part():
    whole = Vision(pairs())
    train, test = torch.utils.data.Subset(whole, range(0, 18, 2)), torch.utils.data.Subset(whole, range(1, 18, 2))
    model = PassLora.create(**SMALL, lift_width=20)
    lesson = model.learn({"train": train, "test": test})
    assert lesson.images == 9 and model.classes == ["0", "1", "2"]
    assert int(next(iter(lesson.evaluations.values())).confusion.sum()) == 9


def test_numbers_count_the_names_that_the_data_has():
    """Folders named by numbers are sorted as text: number 2 is class "10"."""
    data = Vision(pairs())
    data.classes = ["1", "10", "2"]
    model = PassLora.create(**SMALL, lift_width=20)
    model.learn(data)
    zeros = PassLora.create(**SMALL, lift_width=20)
    zeros.learn(pairs())
    assert model.classes == ["1", "10", "2"]
    sums = [m.learner.network.classifier.means for m in (model, zeros)]
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)


def test_a_number_is_no_place_among_known_classes():
    model = PassLora.create(**SMALL, lift_width=20)
    model.learn(pairs(digits=(7, 8)))
    with pytest.raises(PassloraError, match="the label 1 is none"):
        model.learn({"train": pairs(digits=(5,), label=int), "test": pairs(digits=(1,), label=int)})
