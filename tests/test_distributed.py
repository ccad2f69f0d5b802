"""Real processes over a real rendezvous: the numbers must be those of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from passlora import PassloraError
from passlora.runs.run import make_accelerator

ROOT = Path(__file__).parent.parent
BASE = [
    *[
        "train",
        "--compare",
        "none",
        "--task_sizes",
        "4",
        "6",
        "--max_train_per_class",
        "5",
        "--max_test_per_class",
        "3",
    ],
    *["--num_train_epochs", "2", "--horizontal_flip", "true", "--crop_padding", "1", "--brightness", "0.2"],
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def run(command, folder):
    done = subprocess.run(
        [*command, "--output_dir", str(folder)], capture_output=True, text=True, env=ENVIRONMENT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(folder):
    logs = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    curve = [value for log in logs for value in log["steps"]]
    return (
        curve,
        load_file(folder / "prototypes.safetensors"),
        json.loads((folder / "results.json").read_text()),
    )


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# 20 and 30 images in global batches of 6: last batches of 2 and of 6. The batch norm and the nearest new feature
# both look at the whole batch.
FLAGS = {
    "mean": [],
    "batch norm, accumulation": ["--kd_reduction", "batch", "--gradient_accumulation_steps", "2"],
    "cached teacher, checkpointed gradients": [
        *["--cache_teacher", "true", "--gradient_checkpointing", "true"],
        *["--horizontal_flip", "false", "--crop_padding", "0", "--brightness", "0"],
    ],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    for name, flags in FLAGS.items():
        run(
            [sys.executable, "-m", "passlora", *BASE, *flags, "--per_device_train_batch_size", "6"],
            folder / name,
        )
    return folder


def check_equal(one, many):
    curve, memory, results = numbers(one)
    other_curve, other_memory, other_results = numbers(many)
    assert len(curve) == len(other_curve) == 2 * 4 + 2 * 5
    assert max(abs(a - b) / max(1, abs(a)) for a, b in zip(curve, other_curve, strict=True)) < 1e-4
    assert torch.allclose(memory["means"], other_memory["means"], atol=1e-5)
    assert torch.allclose(memory["radii"], other_memory["radii"], atol=1e-5)
    assert results["accuracy_matrix"] == other_results["accuracy_matrix"]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FLAGS))
def test_two_processes_equal_one(alone, tmp_path, name):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    out = run(
        [*launch, "-m", "passlora", *BASE, *FLAGS[name], "--per_device_train_batch_size", "3"],
        tmp_path / "two",
    )
    assert out.count("pass++ task 0 of 0-1") == 1, "only the first process speaks"
    check_equal(alone / name, tmp_path / "two")


@pytest.mark.slow
def test_two_machines_equal_one(alone, tmp_path):
    """One process each on two 'machines' that meet over the loopback address."""
    port = free_port()

    def start(rank):
        command = [
            *[sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(rank)],
            *["--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", str(port)],
            *[
                "-m",
                "passlora",
                *BASE,
                "--per_device_train_batch_size",
                "3",
                "--output_dir",
                str(tmp_path / "two"),
            ],
        ]
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    machines = [start(rank) for rank in range(2)]
    try:
        for machine in machines:
            _, err = machine.communicate(timeout=600)
            assert machine.returncode == 0, err[-3000:]
    finally:
        for machine in machines:
            machine.kill()
    check_equal(alone / "mean", tmp_path / "two")


@pytest.mark.slow
def test_the_two_process_recipe_of_accelerate(alone, tmp_path):
    launch = [
        *[sys.executable, "-m", "accelerate.commands.launch"],
        *["--config_file", str(ROOT / "recipes/accelerate_configs/cpu_2proc.yaml"), "--main_process_port"],
        *[str(free_port()), "-m", "passlora"],
    ]
    run([*launch, *BASE, "--per_device_train_batch_size", "3"], tmp_path / "two")
    check_equal(alone / "mean", tmp_path / "two")


@pytest.mark.slow
def test_batch_statistics_agree_after_a_task(tmp_path):
    """Student and teacher of a network with batch normalisation are the same on every process."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, str(Path(__file__).parent / "two_resnets.py")], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "student 0.0 teacher 0.0" in done.stdout


def test_processes_that_do_not_find_each_other_are_refused(tiny, tmp_path, monkeypatch):
    """Two first processes would overwrite each other's files."""
    Accelerator(cpu=True)  # accelerate has made up its mind: one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PassloraError, match="2 processes were launched but accelerate sees 1"):
        make_accelerator(tiny(), tmp_path)


@pytest.mark.slow
def test_experiments_by_two_processes(tmp_path):
    """Several runs one after another, rows that leave numbers only, and a measure that loads the saved models."""
    tiny = ["--scale", "mini", "--dataset_name", "digits", "--max_train_per_class", "4", "--max_test_per_class", "3"]
    tiny += ["--num_train_epochs", "1", "--lr_milestones", "1", "--seeds", "0"]
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    tables = {}
    for name, launcher, batch in (("one", ["-m"], "4"), ("two", two, "2")):
        for experiment, own in (("fig-12", ["--num_tasks", "2"]), ("table-1", ["--max_classes", "5"])):
            flags = [*tiny, *own, "--per_device_train_batch_size", batch]
            out = run([sys.executable, *launcher, "passlora", "reproduce", experiment, *flags], tmp_path / name)
            assert out.count("the paper's figures in brackets") == 1, "the first process alone speaks"
            tables[name, experiment] = (tmp_path / name / experiment / "mini" / f"{experiment}.csv").read_text()
    assert tables["one", "fig-12"] == tables["two", "fig-12"]
    assert tables["one", "table-1"] == tables["two", "table-1"]


@pytest.mark.slow
def test_lessons_by_two_processes(image_tree, tmp_path):
    """A model started and taught by two processes is the one that a single process makes."""
    image_tree(name="first", classes=("cat", "dog"), size=(20, 20), count=5)
    image_tree(name="second", classes=("owl",), size=(20, 20), count=5)
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    for name, launcher, batch in (("one", ["-m"], "4"), ("two", two, "2")):
        for lesson in ("first", "second"):
            flags = ["--num_train_epochs", "2", "--per_device_train_batch_size", batch, "--save_steps", "2"]
            command = [
                sys.executable,
                *launcher,
                "passlora",
                "learn",
                tmp_path / name,
                "--data",
                tmp_path / lesson,
                *flags,
            ]
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=ENVIRONMENT)
            assert done.returncode == 0, done.stderr[-3000:]
            assert done.stdout.count("learnt") == 1, "the first process alone speaks"
    for file in ("prototypes.safetensors", "task_01/head.safetensors", "task_01/adapter_model.safetensors"):
        one, other = load_file(tmp_path / "one" / file), load_file(tmp_path / "two" / file)
        assert one.keys() == other.keys()
        for key in one:
            assert torch.allclose(one[key].double(), other[key].double(), atol=1e-4), (file, key)
