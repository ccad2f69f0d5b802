from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passlora.config import ScenarioConfig
from passlora.data.scenario import count_classes, make_scenario
from passlora.errors import PassloraError


def scenario(total, **options):
    return make_scenario(ScenarioConfig(**options), range(total))


@pytest.mark.parametrize(
    ("total", "options", "sizes"),
    [
        (100, {"protocol": "half-base", "num_tasks": 5}, [50] + [10] * 5),
        (100, {"protocol": "half-base", "num_tasks": 10}, [50] + [5] * 10),
        (100, {"protocol": "half-base", "num_tasks": 20, "base_classes": 40}, [40] + [3] * 20),
        (100, {"protocol": "half-base", "num_tasks": 25}, [50] + [2] * 25),
        (200, {"protocol": "half-base", "num_tasks": 20}, [100] + [5] * 20),
        (1000, {"protocol": "half-base", "num_tasks": 25}, [500] + [20] * 25),
        (100, {"num_tasks": 10}, [10] * 10),
        (10, {"task_sizes": [4, 2, 2, 2]}, [4, 2, 2, 2]),
        (3, {"num_tasks": 3}, [1, 1, 1]),
    ],
)
def test_the_protocols_of_the_paper(total, options, sizes):
    assert list(scenario(total, **options).task_sizes) == sizes


def test_the_usual_class_order():
    made = scenario(100, num_tasks=10, class_order_seed=1993)
    assert made.class_order[:10] == (68, 56, 78, 8, 23, 84, 90, 65, 74, 76)
    assert scenario(100, num_tasks=10).class_order == tuple(range(100))
    assert scenario(3, num_tasks=3, class_order=[2, 0, 1]).labels(0) == (2,)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_every_class_is_in_exactly_one_task(sizes, seed):
    made = scenario(sum(sizes), task_sizes=sizes, class_order_seed=seed)
    learnt = [label for task in range(made.num_tasks) for label in made.labels(task)]
    assert sorted(learnt) == list(range(sum(sizes)))
    for task in range(made.num_tasks):
        assert [made.class_index[label] for label in made.labels(task)] == list(made.classes(task))
    assert made.seen(made.num_tasks - 1) == made.num_classes


@pytest.mark.parametrize(
    ("total", "options", "says"),
    [
        (100, {"num_tasks": 7}, "num_tasks could be 1, 2, 4, 5, 10, 20, 25, 50, 100"),
        (100, {"protocol": "half-base", "num_tasks": 20}, "base_classes 40 20 tasks of 3"),
        (100, {"protocol": "half-base", "num_tasks": 20}, "base_classes 60 would fit 20 tasks of 2"),
        (10, {"task_sizes": [4, 4]}, "add up to 8, but the dataset has 10"),
        (4, {"num_tasks": 2, "class_order": [0, 1, 2, 2]}, "each of the labels 0..3 once"),
        (10, {"protocol": "half-base", "num_tasks": 2, "base_classes": 10}, "leave 0"),
    ],
)
def test_splits_that_do_not_fit_say_what_would(total, options, says):
    with pytest.raises(PassloraError, match=says):
        scenario(total, **options)


@pytest.mark.parametrize(
    ("labels", "count", "says"),
    [
        ([1, 2, 3], None, "1 of 4 classes have none: 0"),
        ([10, 20], None, "19 of 21 classes have none"),
        ([-1, 0, 1], None, "found -1"),
        ([0, 1, 5], 3, "found 5"),
        ([], None, "no images"),
    ],
)
def test_labels_must_be_complete(labels, count, says):
    with pytest.raises(PassloraError, match=says):
        count_classes(labels, count)


@pytest.mark.parametrize(
    "options",
    [
        {"task_sizes": [2, 0]},
        {"task_sizes": [2], "num_tasks": 1},
        {"num_tasks": 0},
        {"num_tasks": 2, "base_classes": 4},
        {"num_tasks": 2, "class_order": [0, 1], "class_order_seed": 1},
    ],
)
def test_contradictions_are_refused(options):
    with pytest.raises(PassloraError):
        ScenarioConfig(**options)
