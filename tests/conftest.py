"""Shared pieces. Tests need no network: the Hub clients are told so before anything imports them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, a thread each

import numpy as np
import pytest
import torch
from PIL import Image

from passlora import Config
from passlora.cli.main import main
from passlora.config import MethodConfig
from passlora.method.classifiers import Head
from passlora.method.memory import Draw


def plain_head(dim):
    """A head of one node a class: `grow(n)` adds n nodes."""
    return Head(dim, Config.make(preset="finetune", num_tasks=1).method)


def in_two_shares(work):
    """`work(rank, reduce)` for two ranks at once, `reduce` adding a tensor up over both; returns both results."""
    barrier, given = threading.Barrier(2, timeout=60), [None, None]

    def run(rank):
        def reduce(tensor):
            given[rank] = tensor.clone()
            barrier.wait()
            total = given[0] + given[1]
            barrier.wait()
            return total

        return work(rank, reduce)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def pytest_runtest_setup():
    """The libraries stay: the garbage collection that accelerate asks for after each task need not look at them."""
    if "peft" in sys.modules and gc.get_freeze_count() == 0:
        gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # some libraries count what they leave behind


def pytest_xdist_auto_num_workers():
    """One more than cores: tests wait for files, servers and other processes, and not every worker ends at once."""
    return (os.cpu_count() or 1) + 1


LONG = (
    "test_rivals",
    "test_drift",
    "test_lifecycle",
    "test_reproduce",
    "test_page",
    "test_baselines",
    "test_format1",
    "test_run",
    "test_beyond",
)


def pytest_collection_modifyitems(items):
    """Long files first: a worker takes whole files, and none should start a long one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path.stem not in LONG))


SMALL = {"model_name_or_path": "test_vit", "pretrained": False, "image_size": 32}  # a tenth of the bundled one's time


@pytest.fixture
def small(tiny):
    """As `tiny`, on a transformer of random weights with 64 dimensions, for tests that need no good features."""
    return lambda **changes: tiny(**{**SMALL, **changes})


@pytest.fixture
def tiny():
    """A run of seconds: two tasks of real digits on the bundled backbone."""

    def make(**changes):
        base = {
            "dataset_name": "digits",
            "task_sizes": [6, 4],
            "max_train_per_class": 6,
            "max_test_per_class": 4,
            "crop_padding": 1,
            "horizontal_flip": False,
            "num_train_epochs": 1,
            "per_device_train_batch_size": 8,
        }
        return Config.make(**{**base, **changes})

    return make


@pytest.fixture
def case():
    """A random objective in float64: head of 5 classes (3 old) in 4 views, a batch of 3 images of new classes."""

    class Case:
        views, old, new, images, dim, drawn = 4, 3, 2, 3, 7, 9

        def __init__(self):
            g = torch.Generator().manual_seed(7)
            self.head = Head(self.dim, MethodConfig()).double()
            self.head.grow(self.old + self.new)
            with torch.no_grad():
                self.head.weight.copy_(torch.randn(self.head.weight.shape, generator=g, dtype=torch.float64))
                self.head.bias.copy_(torch.randn(self.head.bias.shape, generator=g, dtype=torch.float64))
            self.z = torch.randn(self.views * self.images, self.dim, generator=g, dtype=torch.float64)
            self.z.requires_grad_()
            classes = torch.tensor([3, 4, 3])
            self.nodes = torch.tensor([self.views * int(c) + v for c in classes for v in range(self.views)])
            self.teacher = torch.randn(self.z.shape, generator=g, dtype=torch.float64)
            nodes = torch.randint(self.views * self.old, (self.drawn,), generator=g)
            means = torch.randn(self.drawn, self.dim, generator=g, dtype=torch.float64)
            noise = torch.randn(self.drawn, self.dim, generator=g, dtype=torch.float64)
            self.draw = Draw(nodes, means, torch.tensor(0.36, dtype=torch.float64), 0.6 * noise)
            root = torch.randn(self.drawn, self.dim, self.dim, generator=g, dtype=torch.float64)
            self.full = root @ root.transpose(1, 2) / self.dim

    return Case()


def image_files(root, splits=("train", "test"), classes=("cat", "dog", "owl"), count=4, size=(40, 30), mode="RGB"):
    """Image files of `classes`, `count` each, in folders under `root`."""
    rng = np.random.default_rng(0)
    for split in splits or ("",):
        for label, kind in enumerate(classes):
            folder = root / split / kind
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 80, (size[1], size[0], 3)).astype(np.uint8) + np.uint8(50 * label)
                Image.fromarray(pixels).convert(mode).save(folder / f"{i}.png")
    return root


@pytest.fixture
def image_tree(tmp_path):
    """Image files under tmp_path/name, as `image_files` makes them."""
    return lambda name="photos", **options: image_files(tmp_path / name, **options)


@pytest.fixture(scope="session")
def bf16_works():
    """Whether bfloat16 runs on this CPU: some virtual machines name instructions they do not grant, which is fatal."""
    probe = "import torch; x = torch.ones(64, 64).bfloat16(); x @ x; torch.nn.functional.linear(x, x)"
    return subprocess.run([sys.executable, "-c", probe]).returncode == 0


HOLD = """
import sys, time
from pathlib import Path
from passlora.folder.lock import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def held():
    """A folder that another process has locked, for the time of the block."""

    @contextmanager
    def hold(folder):
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout.readline() == "held\n"
            yield
        finally:
            holder.kill()
            holder.wait()

    return hold


@pytest.fixture
def stock_peft(tmp_path):
    """Features of the bundled backbone with the adapter of a model's second task, computed without passlora."""

    def features(model, x, environment=None):
        torch.save(x, tmp_path / "x.pt")
        weights = resources.files("passlora") / "assets/vit_mini_patch16_64.safetensors"
        script = Path(__file__).parent / "stock_peft.py"
        command = [sys.executable, script, model, weights, tmp_path / "x.pt", tmp_path / "z.pt"]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return torch.load(tmp_path / "z.pt")

    return features


@pytest.fixture
def cli(capsys):
    """The command line in process: exit code, standard output, standard error."""

    def call(*argv):
        try:
            main([str(part) for part in argv])
            code = 0
        except SystemExit as done:
            code = done.code or 0
        output = capsys.readouterr()
        return code, output.out, output.err

    return call
