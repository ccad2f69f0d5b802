"""A kill at any moment leaves the last good state, and the same command continues from it with the same result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from passlora import PassloraError, files, train
from passlora.folder import layout, store


@pytest.mark.slow
@pytest.mark.parametrize(("work", "stride", "offset"), [("train", "31", "9"), ("learn", "5", "3")])
def test_killed_work_ends_as_if_nothing_had_happened(image_tree, tmp_path, work, stride, offset):
    """SIGKILL at points spread over all of it, twice each; every weight, number and loss must be the same."""
    data = image_tree(size=(12, 12), count=4)
    script = Path(__file__).parent / "kill_sweep.py"
    command = [sys.executable, str(script), work, str(tmp_path / "work"), str(data), stride, offset]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert " 0 different" in done.stdout


def test_a_run_in_use_is_refused(tiny, tmp_path, held):
    with held(tmp_path / "run"), pytest.raises(PassloraError, match="in use by another process"):
        train(tiny(output_dir=str(tmp_path / "run")), lambda text: None)


@pytest.mark.parametrize("options", [{}, {"lora_r": 0, "pretrained": False, "model_name_or_path": "passlora/resnet18"}])
def test_a_checkpoint_continues_bit_for_bit(tiny, tmp_path, options, monkeypatch):
    """Taken in the second task, two updates before its end; accumulation, LoRA and a network trained whole."""
    flags = {"num_train_epochs": 3, "max_train_per_class": 2, "gradient_accumulation_steps": 2, **options}
    flags |= {"per_device_train_batch_size": 4, "max_test_per_class": 1}
    config = tiny(**flags, save_steps=2, output_dir=str(tmp_path / "run"))
    taken = {}
    write = files.write_tensors

    def keep(path, tensors):
        write(path, tensors)
        if path.name == layout.CHECKPOINT and int(tensors["task"]) == 1:
            taken[int(tensors["step"])] = path.read_bytes()

    monkeypatch.setattr(store, "write_tensors", keep)
    train(config, lambda text: None)
    last = tmp_path / "run" / "task_01"

    def weights():
        return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}

    final = weights()
    assert len(final) >= 2 and sorted(taken) == [2, 4]
    assert not (tmp_path / "run" / layout.CHECKPOINT).exists(), "a finished task needs none"

    def interrupted(**changes):
        """The folder as it was when the checkpoint had been written."""
        manifest = store.read_manifest(tmp_path / "run")
        manifest.tasks = manifest.tasks[:1]
        files.write_json(tmp_path / "run" / layout.MANIFEST, store.to_json(manifest))
        (tmp_path / "run" / layout.CHECKPOINT).write_bytes(taken[2])

    interrupted()
    said = []
    train(config, said.append)
    assert "continuing with task 1, step 2" in "\n".join(said)
    assert weights() == final
