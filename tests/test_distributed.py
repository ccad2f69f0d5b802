"""Real processes over a real rendezvous: the numbers must be those of one process.

Most read what some_processes.py brought back, which forks processes that meet as those of torchrun do; some of the
slow ones are launched by torchrun and accelerate themselves.
"""

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
from accelerate.utils import DistributedType
from conftest import SMALL, image_files
from safetensors.torch import load_file

from passlora import PassLora, PassloraError
from passlora.config import TrainingConfig
from passlora.folder.manifest import read_manifest
from passlora.training import accelerator as made
from passlora.training.accelerator import make_accelerator

HERE = Path(__file__).parent
BASE = [
    *[
        "train",
        "--compare",
        "none",
        "--num_train_epochs",
        "2",
        "--max_train_per_class",
        "5",
        "--max_test_per_class",
        "3",
    ],
    *["--horizontal_flip", "true", "--crop_padding", "1", "--brightness", "0.2"],
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
# In global batches of 6, last batches of 2 and 6 images; quick ones are of fewer classes, with 4 and 3.
WHOLE = [*BASE, "--task_sizes", "4", "6"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
QUICK = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
QUICK_RUN = [*BASE, *QUICK, "--max_classes", "5", "--task_sizes", "2", "3"]

# The batch norm and the nearest new feature both look at the whole batch.
FLAGS = {
    "batch norm, accumulation": ["--kd_reduction", "batch", "--gradient_accumulation_steps", "2"],
    "cached teacher, checkpointed gradients": [
        *["--cache_teacher", "true", "--gradient_checkpointing", "true"],
        *["--horizontal_flip", "false", "--crop_padding", "0", "--brightness", "0"],
    ],
}


# The first lesson has the four classes that deciding whether to adapt takes.
FITTED = {"fetril": ["--num_train_epochs", 1], "passlora": ["--lift_width", 30], "sldc": ["--num_train_epochs", 1]}
# What the default tests try of these; the others come with the slow ones.
QUICK_FITTED = "passlora"


def numbers(folder):
    logs = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    curve = [value for log in logs for value in log["steps"]]
    memory = load_file(folder / "task_01" / "memory.safetensors")
    return curve, memory, json.loads((folder / "results.json").read_text())


def check_equal(one, many, steps):
    curve, memory, results = numbers(one)
    other_curve, other_memory, other_results = numbers(many)
    assert len(curve) == len(other_curve) == steps
    assert max(abs(a - b) / max(1, abs(a)) for a, b in zip(curve, other_curve, strict=True)) < 1e-4
    assert torch.allclose(memory["means"], other_memory["means"], atol=1e-5)
    assert torch.allclose(memory["radius"], other_memory["radius"], atol=1e-5)
    assert results["accuracy_matrix"] == other_results["accuracy_matrix"]


def damage_the_last_test_image(root):
    """Cut off in the middle: its size can be read, its pixels cannot. The second process is to read it."""
    last = max((root / "test").glob("*/*.png"))
    last.write_bytes(last.read_bytes()[:2000])
    return last


# --- forked processes --------------------------------------------------------------------------------------------


def job(name, place, *argv, processes=2, batch=None, **options):
    """In global batches of 6, unless `batch` says how many images a process takes."""
    size = ["--per_device_train_batch_size", str(batch or 6 // processes)]
    return {"name": name, "argv": [*map(str, argv), *place, *size], "processes": processes, **options}


def runs(folder, name):
    """A run with the flags of that name, by one process and by two."""
    for processes in (1, 2):
        place = ["--output_dir", str(folder / f"{name} {processes}")]
        yield job(f"{name} {processes}", place, *QUICK_RUN, *FLAGS[name], processes=processes)


def lessons(folder, preset):
    """Two lessons of a preset that takes sums over a task's images, by one process and by two."""
    for lesson, names in (("first", ("cat", "dog", "emu", "fox")), ("second", ("owl",))):
        if not (folder / lesson).is_dir():  # of another preset's lessons
            image_files(folder / lesson, classes=names, size=(20, 20), count=5)
    for processes in (1, 2):
        for lesson in ("first", "second"):
            born = [] if lesson == "second" else ["--preset", preset, *QUICK, *FITTED[preset]]
            place = ["--data", str(folder / lesson)]
            name = f"{preset} {processes}"
            yield job(f"{name} {lesson}", place, "learn", folder / name, *born, processes=processes)


def quick_jobs(folder):
    """Each a command, on so many processes."""
    yield from lessons(folder, QUICK_FITTED)
    photographs = image_files(folder / "photographs", size=(80, 70))
    damage_the_last_test_image(photographs)
    learn = ["learn", folder / "damaged", "--preset", "slda", *QUICK, "--dataloader_num_workers", 0]
    yield job("damaged", ["--data", str(photographs)], *learn)
    place = ["--output_dir", str(folder / "DeepSpeed")]
    yield job("DeepSpeed", place, *QUICK_RUN, env={"ACCELERATE_USE_DEEPSPEED": "true"})


def more_jobs(folder):
    for name in FLAGS:
        yield from runs(folder, name)
    for preset in FITTED.keys() - {QUICK_FITTED}:
        yield from lessons(folder, preset)
    yield {"name": "batch statistics", "argv": ["two_resnets", "test_resnet"], "processes": 2}
    cut_off = [*QUICK_RUN, "--preset", "finetune", "--save_steps", 1]
    place = ["--output_dir", str(folder / "cut off")]
    yield job("cut off", place, *cut_off, die_after=2)
    yield job("cut off, on one", place, *cut_off, processes=1, batch=3)
    yield job("cut off, on two", place, *cut_off)
    yield job("never cut off", ["--output_dir", str(folder / "never cut off")], *cut_off)


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    return do_all(quick_jobs, tmp_path_factory.mktemp("forked"))


@pytest.fixture(scope="module")
def forked_more(tmp_path_factory):
    return do_all(more_jobs, tmp_path_factory.mktemp("forked_more"))


def do_all(make_jobs, folder):
    """The folder, and what became of every job."""
    jobs = list(make_jobs(folder))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(HERE / "some_processes.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((folder / "done.json").read_text())
    return folder, {job["name"]: found for job, found in zip(jobs, results, strict=True)}


def ended_well(found):
    return all(code == 0 for code in found["codes"]) or pytest.fail(str(found)[-3000:])


def quick_or_slow(names, quick):
    """Values of a parameter, with the fixture that has done its jobs."""
    return [
        pytest.param(name, "forked") if name == quick else pytest.param(name, "forked_more", marks=pytest.mark.slow)
        for name in names
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FLAGS))
def test_two_processes_equal_one(forked_more, name):
    folder, done = forked_more
    assert ended_well(done[f"{name} 1"]) and ended_well(done[f"{name} 2"])
    assert done[f"{name} 2"]["out"][0].count("pass++ task 0 of 0-1") == 1
    said = [line for line in done[f"{name} 2"]["out"][1].splitlines() if not line.startswith("[Gloo]")]  # torch's own
    assert said == [], "only the first process speaks"
    check_equal(folder / f"{name} 1", folder / f"{name} 2", 2 * (2 + 3))


@pytest.mark.parametrize(("preset", "fixture"), quick_or_slow(FITTED, QUICK_FITTED))
def test_lessons_that_take_sums_by_two_processes(request, preset, fixture):
    folder, done = request.getfixturevalue(fixture)
    for lesson in ("first", "second"):
        assert ended_well(done[f"{preset} 1 {lesson}"]) and ended_well(done[f"{preset} 2 {lesson}"])
        assert done[f"{preset} 2 {lesson}"]["out"][0].count("learnt") == 1
    one, two = (load_file(folder / f"{preset} {n}" / "task_01" / "classifier.safetensors") for n in (1, 2))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
def test_batch_statistics_agree_after_a_task(forked_more):
    """Student and teacher of a network with batch normalisation are the same on every process."""
    _, done = forked_more
    assert ended_well(done["batch statistics"])
    assert "student 0.0 teacher 0.0 moved True" in done["batch statistics"]["out"][0]


def test_a_damaged_test_photograph_ends_a_lesson_on_every_process(forked):
    """One process finds it, the others do not wait for ever: what was learnt is saved, and the reason is told."""
    folder, done = forked
    found = done["damaged"]
    assert found["codes"] == [1, 0], found
    assert "learnt and saved, but not tested" in found["err"][0] and "owl" in found["err"][0]
    assert read_manifest(folder / "damaged").classes == ["cat", "dog", "owl"]


@pytest.mark.slow
def test_a_task_goes_on_with_as_many_processes_only(forked_more):
    """The same seed means other batches with another number of them: the schedule would move unnoticed."""
    folder, done = forked_more
    assert done["cut off"]["codes"][0] == 9
    assert done["cut off, on one"]["codes"] == [2]
    assert "processes was 2, is 1" in done["cut off, on one"]["err"][0]
    assert ended_well(done["cut off, on two"]) and ended_well(done["never cut off"])
    assert "continuing with task 0, step 2" in done["cut off, on two"]["out"][0]
    for file in ("training_log.jsonl", "task_01/classifier.safetensors", "task_01/adapter_model.safetensors"):
        assert (folder / "cut off" / file).read_bytes() == (folder / "never cut off" / file).read_bytes(), file


def test_deepspeed_is_refused_in_one_sentence(forked):
    folder, done = forked
    found = done["DeepSpeed"]
    assert found["codes"] == [2, 2], found
    lines = [line for line in found["err"][0].splitlines() if line.startswith("passlora: error")]
    assert len(lines) == 1 and "DeepSpeed" in lines[0] and "Traceback" not in found["err"][0]
    assert not (folder / "DeepSpeed").exists()


# --- what accelerate says ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_every_way_to_cut_weights_in_pieces_is_named(monkeypatch, kind):
    class Cutting:
        distributed_type, num_processes = kind, 1

        def __init__(self, **options):
            pass

    monkeypatch.setattr(made, "Accelerator", Cutting)
    with pytest.raises(PassloraError, match=rf"configured for {kind.value}, which cuts the weights.*ddp\.yaml"):
        make_accelerator(TrainingConfig())


@pytest.mark.parametrize("make", [lambda: make_accelerator(TrainingConfig()), lambda: PassLora.create(**SMALL)])
def test_processes_that_do_not_find_each_other_are_refused(monkeypatch, make):
    """Two first processes would overwrite each other's files; whether a run or a program of one's own started them."""
    Accelerator(cpu=True)  # accelerate has made up its mind: one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PassloraError, match="2 processes were launched but accelerate sees 1"):
        make()


# --- by torchrun and accelerate ----------------------------------------------------------------------------------


def run(command, folder):
    done = subprocess.run(
        [*command, "--output_dir", str(folder)], capture_output=True, text=True, env=ENVIRONMENT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """On the bundled backbone."""
    folder = tmp_path_factory.mktemp("alone")
    run([sys.executable, "-m", "passlora", *WHOLE, "--per_device_train_batch_size", "6"], folder / "mean")
    return folder / "mean"


@pytest.mark.slow
def test_torchrun_equals_one_process(alone, tmp_path):
    out = run([*TORCHRUN, "-m", "passlora", *WHOLE, "--per_device_train_batch_size", "3"], tmp_path / "two")
    assert out.count("pass++ task 0 of 0-1") == 1, "only the first process speaks"
    check_equal(alone, tmp_path / "two", 2 * (4 + 5))


@pytest.mark.slow
def test_two_machines_equal_one(alone, tmp_path):
    """One process each on two 'machines' that meet over the loopback address."""
    port = free_port()

    def start(rank):
        command = [
            *[sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(rank)],
            *["--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", str(port)],
            *["-m", "passlora", *WHOLE, "--per_device_train_batch_size", "3", "--output_dir", str(tmp_path / "two")],
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
    check_equal(alone, tmp_path / "two", 2 * (4 + 5))


@pytest.mark.slow
def test_the_two_process_recipe_of_accelerate(alone, tmp_path):
    launch = [
        *[sys.executable, "-m", "accelerate.commands.launch"],
        *["--config_file", str(HERE.parent / "recipes/accelerate_configs/cpu_2proc.yaml"), "--main_process_port"],
        *[str(free_port()), "-m", "passlora"],
    ]
    run([*launch, *WHOLE, "--per_device_train_batch_size", "3"], tmp_path / "two")
    check_equal(alone, tmp_path / "two", 2 * (4 + 5))


@pytest.mark.slow
def test_batch_statistics_of_resnet18_agree_after_a_task():
    done = subprocess.run(
        [*TORCHRUN, str(HERE / "two_resnets.py")], capture_output=True, text=True, env=ENVIRONMENT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "student 0.0 teacher 0.0 moved True" in done.stdout


@pytest.mark.slow
def test_a_damaged_test_photograph_under_torchrun(tmp_path):
    photographs = image_files(tmp_path / "photographs", size=(80, 70))
    damage_the_last_test_image(photographs)
    command = [*TORCHRUN, "-m", "passlora", "learn", str(tmp_path / "model"), "--data", str(photographs), *QUICK]
    done = subprocess.run(
        [*command, "--num_train_epochs", "1"], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )
    assert done.returncode == 1 and "learnt and saved, but not tested" in done.stderr
    assert read_manifest(tmp_path / "model").classes == ["cat", "dog", "owl"]


@pytest.mark.slow
def test_experiments_by_two_processes(tmp_path):
    """Several runs one after another, and a measure that loads the saved models."""
    tiny = ["--scale", "mini", "--dataset_name", "digits", "--max_train_per_class", "4", "--max_test_per_class", "3"]
    tiny += ["--num_train_epochs", "1", "--lr_milestones", "1", "--seeds", "0"]
    tables = {}
    for name, launcher, batch in (("one", [sys.executable], "4"), ("two", TORCHRUN, "2")):
        for experiment, own in (("fig-12", ["--num_tasks", "2"]), ("table-1", ["--max_classes", "5"])):
            flags = [*tiny, *own, "--per_device_train_batch_size", batch]
            out = run([*launcher, "-m", "passlora", "reproduce", experiment, *flags], tmp_path / name)
            assert out.count("the paper's figures in brackets") == 1, "the first process alone speaks"
            tables[name, experiment] = (tmp_path / name / experiment / "mini" / f"{experiment}.csv").read_text()
    assert tables["one", "fig-12"] == tables["two", "fig-12"]
    assert tables["one", "table-1"] == tables["two", "table-1"]


@pytest.mark.slow
def test_lessons_by_two_processes(image_tree, tmp_path):
    """A model started and taught by two processes is the one that a single process makes."""
    image_tree(name="first", classes=("cat", "dog"), size=(20, 20), count=5)
    image_tree(name="second", classes=("owl",), size=(20, 20), count=5)
    for name, launcher, batch in (("one", [sys.executable], "4"), ("two", TORCHRUN, "2")):
        for lesson in ("first", "second"):
            flags = ["--num_train_epochs", "2", "--per_device_train_batch_size", batch, "--save_steps", "2"]
            flags += ["--preset", "pass++"] if lesson == "first" else []
            command = [*launcher, "-m", "passlora", "learn", tmp_path / name, "--data", tmp_path / lesson, *flags]
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=ENVIRONMENT)
            assert done.returncode == 0, done.stderr[-3000:]
            assert done.stdout.count("learnt") == 1, "the first process alone speaks"
    for file in ("memory.safetensors", "classifier.safetensors", "adapter_model.safetensors"):
        one, other = (load_file(tmp_path / name / "task_01" / file) for name in ("one", "two"))
        assert one.keys() == other.keys()
        for key in one:
            assert torch.allclose(one[key].double(), other[key].double(), atol=1e-4), (file, key)
