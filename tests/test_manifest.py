"""The manifest and the tensors of a stranger: whatever they hold, one error of ours or a model, nothing else."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from passlora import Config, PassloraError
from passlora.files import read_tensors
from passlora.folder.manifest import MANIFEST, Manifest, TaskEntry, check, read_manifest, settings_of, to_json

SETTINGS = settings_of(Config.make(num_tasks=2))
FILES = {"classifier.safetensors": 64 * "0", "settings.json": 64 * "f"}
GOOD = to_json(
    Manifest(
        SETTINGS,
        [TaskEntry(["a", "b"], "2026-01-01", 50.0, files=FILES), TaskEntry(["c"], "", 40.0, tested=2, files=FILES)],
    )
)
WORDY = {**GOOD, "settings": SETTINGS}  # with every setting, also those at their defaults
OLD = {**WORDY, "format_version": 1}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=8,
)


def places(value, path=()):
    """Every path into a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def form(*shape):
    return torch.empty(*shape, device="meta")


PLACES = [place for place in places(WORDY) if place]


def test_a_good_manifest_reads_back():
    manifest = check(json.loads(json.dumps(GOOD)))
    assert manifest.classes == ["a", "b", "c"] and to_json(manifest) == GOOD
    assert manifest.config().model.lora_r == 4


@pytest.mark.parametrize("content", [WORDY, OLD], ids=["format 2", "format 1"])
def test_what_other_versions_write_is_read(content):
    manifest = check(json.loads(json.dumps(content)))
    assert manifest.settings == SETTINGS and manifest.classes == ["a", "b", "c"]


def put_anything(base, place, value):
    content = copy.deepcopy(base)
    target = content
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    try:
        manifest = check(content)
    except PassloraError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
    else:
        assert all(isinstance(name, str) for name in manifest.classes)
        assert check(json.loads(json.dumps(to_json(manifest)))).settings == manifest.settings, "it is written as read"


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([WORDY, OLD]), st.sampled_from(PLACES), ANYTHING)
def test_any_value_anywhere_is_read_or_refused(base, place, value):
    put_anything(base, place, value)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(st.sampled_from([WORDY, OLD]), st.sampled_from(PLACES), ANYTHING)
def test_any_value_anywhere_many_times(base, place, value):
    put_anything(base, place, value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path, data):
    raw = bytearray(json.dumps(GOOD).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / MANIFEST).write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        read_manifest(tmp_path)
    except PassloraError as error:
        assert "\n" not in str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_tensors_are_read_or_refused(tmp_path, data):
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        tensors = read_tensors(tmp_path, path, {"weight": form(4, 3), "bias": form(4)})
    except PassloraError as error:
        assert "\n" not in str(error)
    else:
        assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("claimed", [2**20, 2**31, 2**62])
def test_a_header_that_claims_more_than_the_file_holds(tmp_path, claimed):
    """Refused before anything of that size is allocated."""
    path = tmp_path / "x.safetensors"
    header = json.dumps({"weight": {"dtype": "F32", "shape": [claimed], "data_offsets": [0, 4 * claimed]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(PassloraError, match="not a readable safetensors file"):
        read_tensors(tmp_path, path, {"weight": form(4)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.complex64])
def test_tensors_of_another_type(tmp_path, dtype):
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(4, dtype=dtype)}, path)
    with pytest.raises(PassloraError, match="weight has type"):
        read_tensors(tmp_path, path, {"weight": form(4)})
