"""Progress where nobody sees a bar: a line now and then, none for what is short."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from passlora.display import progress as module
from passlora.display.progress import duration, progress


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.delenv("RANK", raising=False)
    return now


def test_lines_of_a_long_training(clock, capsys):
    bar = progress(total=30, desc="task 1", unit="step")
    said = {}
    for step in range(30):
        clock.seconds += 4
        bar.set_postfix_str(f"epoch {step // 10 + 1}/3, loss 0.123")
        bar.update()
        if line := capsys.readouterr().err:
            said[4 * (step + 1)] = line
    bar.close()
    assert said == {
        12: "task 1, epoch 1/3, loss 0.123: 10% (12 s, 108 s left)\n",
        44: "task 1, epoch 2/3, loss 0.123: 36% (44 s, 76 s left)\n",
        76: "task 1, epoch 2/3, loss 0.123: 63% (76 s, 44 s left)\n",
        108: "task 1, epoch 3/3, loss 0.123: 90% (108 s, 12 s left)\n",
    }


def test_a_task_that_goes_on_inside_itself(clock, capsys):
    """What was done before the start took none of this time."""
    bar = progress(total=40, initial=20, desc="task 1")
    clock.seconds += 15
    bar.update(10)
    assert capsys.readouterr().err == "task 1: 75% (15 s, 15 s left)\n"


def test_what_is_short_says_nothing(clock, capsys):
    for _ in progress(range(5), desc="reading"):
        clock.seconds += 1.9
    assert capsys.readouterr() == ("", "")


def test_what_is_done_says_nothing(clock, capsys):
    for _ in progress(range(1), desc="reading"):
        clock.seconds += 60
    assert capsys.readouterr().err == ""


def test_an_end_that_is_not_known(clock, capsys):
    seen = []
    for item in progress(iter("abc"), desc="testing", unit="batch"):
        seen.append(item)
        clock.seconds += 8
    assert seen == ["a", "b", "c"]
    assert capsys.readouterr().err == "testing: batch 2 (16 s)\n"


def test_other_processes_say_nothing(clock, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    bar = progress(total=3, desc="task 1")
    clock.seconds += 60
    bar.update()
    bar.close()
    assert bar.disable and capsys.readouterr().err == ""


def test_on_a_terminal_it_is_a_bar(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for _ in progress(range(3), desc="reading", mininterval=0):
        time.sleep(0.01)
    assert "reading:" in (err := capsys.readouterr().err) and "\r" in err


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations(seconds, words):
    assert duration(seconds) == words
