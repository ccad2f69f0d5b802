"""A kill at any moment leaves the last good state, and the same command continues from it with the same result."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from quick import quick as quick
from safetensors import safe_open
from safetensors.torch import load_file

from passlora import PassloraError, train
from passlora.files import write_tensors
from passlora.folder import checkpoints, layout
from passlora.folder.manifest import read_manifest, write_manifest


@pytest.mark.slow
@pytest.mark.parametrize(("work", "stride", "offset"), [("train", 9, 4), ("learn", 3, 2)])
def test_killed_work_ends_as_if_nothing_had_happened(image_tree, tmp_path, work, stride, offset):
    """SIGKILL at points spread over all of it, twice each; every weight, number and loss must be the same."""
    data = image_tree(size=(12, 12), count=4)
    script = Path(__file__).parent / "kill_sweep.py"
    command = [sys.executable, str(script), work, str(tmp_path / "work"), str(data), str(stride), str(offset)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert " 0 different" in done.stdout and "kills at 0" not in done.stdout


def test_a_run_in_use_is_refused(tiny, tmp_path, held):
    with held(tmp_path / "run"), pytest.raises(PassloraError, match="in use by another process"):
        train(tiny(output_dir=str(tmp_path / "run")))


class Interrupted:
    """A finished run whose folder can be put back to where a checkpoint of its second task had been written."""

    def __init__(self, config, monkeypatch):
        self.folder, self.config, self.taken = Path(config.training.output_dir), config, {}

        def keep(path, tensors, metadata=None):
            write_tensors(path, tensors, metadata)
            if int(tensors["task"]) == 1:
                self.taken[int(tensors["step"])] = path.read_bytes()

        monkeypatch.setattr(checkpoints, "write_tensors", keep)
        train(config)
        self.final, self.after = self.weights(), self.checkpoint.exists()

    @property
    def checkpoint(self):
        return self.folder / layout.CHECKPOINT

    def weights(self):
        return {path.name: path.read_bytes() for path in (self.folder / "task_01").glob("*.safetensors")}

    def cut_off_after(self, step):
        manifest = read_manifest(self.folder)
        manifest.tasks = manifest.tasks[:1]
        write_manifest(self.folder, manifest)
        self.checkpoint.write_bytes(self.taken[step])


BUDGET = {"num_train_epochs": 3, "max_train_per_class": 2, "gradient_accumulation_steps": 2, "max_test_per_class": 1}


FOLLOWED = {"preset": "slda", "adapt_tasks": "all", "drift": "linear"}  # the features before the task are read again
CASES = [{}, {"lora_r": 0}, {"lora_r": 0, "model_name_or_path": "test_resnet"}, FOLLOWED, {"preset": "sldc"}]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_checkpoint_continues_bit_for_bit(small, tmp_path, options, monkeypatch, caplog):
    """Taken in the second task, two updates before its end; accumulation, LoRA and networks trained whole."""
    caplog.set_level(logging.INFO, "passlora")
    flags = {**BUDGET, **options, "per_device_train_batch_size": 4}
    run = Interrupted(small(**flags, save_steps=2, output_dir=str(tmp_path / "run")), monkeypatch)
    assert len(run.final) == (2 if options is FOLLOWED else 3) and sorted(run.taken) == [2, 4]
    assert not run.after, "a finished task needs none"
    run.cut_off_after(2)
    train(run.config)
    assert f"{options.get('preset', 'pass++')}: continuing with task 1, step 2" in caplog.messages
    assert run.weights() == run.final


def test_a_checkpoint_of_other_settings_or_processes_is_refused(small, tmp_path, monkeypatch):
    """By the words in the file: test_distributed.py has it from two real processes."""
    run = Interrupted(small(**BUDGET, save_steps=2, output_dir=str(tmp_path / "run")), monkeypatch)
    run.cut_off_after(2)
    before = run.checkpoint.read_bytes()
    with safe_open(run.checkpoint, framework="pt") as file:
        lesson = json.loads(file.metadata()["lesson"])
    tensors = load_file(run.checkpoint)
    for change, says in (({"processes": 2}, "processes was 2, is 1"), ({"seed": 3}, "seed was 3, is 0")):
        write_tensors(run.checkpoint, tensors, {"lesson": json.dumps({**lesson, **change})})
        with pytest.raises(PassloraError, match=rf"{says}.*delete .*{layout.CHECKPOINT}"):
            train(run.config)
    run.checkpoint.write_bytes(before)
    train(run.config)
    assert run.weights() == run.final
