"""Safetensors directories, whole and damaged."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from deepinfer_core.checkpoint.safetensors import DTYPES, SafetensorsCheckpoint, SafetensorsFormat
from deepinfer_core.errors import CheckpointError, TokenizerError
from deepinfer_core.interfaces.checkpoint import Checkpoint, CheckpointFormat

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b.weight": torch.randn(4, 2, generator=generator).bfloat16(),
        "c.bias": torch.arange(6).to(torch.float16),
        "d.scale": torch.ones(2, 2).to(torch.float8_e4m3fn),
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_sharded(folder: Path, weight_map: Mapping[str, str] | None = None) -> Path:
    parts = list(tensors().items())
    save_file(dict(parts[:2]), folder / FIRST)
    save_file(dict(parts[2:]), folder / SECOND)
    places = {name: FIRST if name[0] in "ab" else SECOND for name, _ in parts}
    write_json(folder / INDEX, {"weight_map": {**places, **(weight_map or {})}})
    write_json(folder / "config.json", {"model_type": "llama", "eos_token_id": 2})
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_sharded(tmp_path)


def problems_of(path: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(path)
    assert str(path) in str(caught.value)
    return caught.value.problems


def test_shards_read_back_bit_for_bit(sharded: Path) -> None:
    checkpoint = SafetensorsCheckpoint(sharded)
    assert checkpoint.names() == tuple(sorted(tensors()))
    for name, expected in tensors().items():
        found, info = checkpoint.read(name), checkpoint.info(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        assert info.shape == tuple(expected.shape)
        assert info.dtype == info.format == str(expected.dtype).removeprefix("torch.")
        assert info.num_bytes == expected.nbytes
        assert checkpoint.read_packed(name) is None
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in tensors().values())


def test_one_file_opens_with_the_config_beside_it(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"model_type": "qwen3"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert SafetensorsFormat().why_not(path) is None
        checkpoint = SafetensorsFormat().open(path)
        assert checkpoint.config["model_type"] == "qwen3"
        assert len(checkpoint.names()) == len(tensors())


def test_the_classes_fit_their_interfaces(sharded: Path) -> None:
    assert isinstance(SafetensorsFormat(), CheckpointFormat)
    assert isinstance(SafetensorsCheckpoint(sharded), Checkpoint)


def test_other_paths_are_turned_away_with_a_reason(tmp_path: Path) -> None:
    reasons = SafetensorsFormat()
    assert "does not exist" in (reasons.why_not(tmp_path / "missing") or "")
    assert "holds no" in (reasons.why_not(tmp_path) or "")
    (tmp_path / "x.gguf").touch()
    assert "is not a *.safetensors file" in (reasons.why_not(tmp_path / "x.gguf") or "")


def test_tensors_outlive_the_checkpoint(sharded: Path) -> None:
    checkpoint = SafetensorsCheckpoint(sharded)
    weights = checkpoint.read("a.weight")
    checkpoint.close()
    checkpoint.close()
    assert torch.equal(weights, tensors()["a.weight"])
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("a.weight")
    with pytest.raises(CheckpointError, match="no tensor 'nope'"):
        checkpoint.info("nope")


def test_all_problems_of_a_directory_are_listed_at_once(sharded: Path) -> None:
    weight_map = {
        **json.loads((sharded / INDEX).read_text())["weight_map"],
        "ghost.weight": FIRST,
        "lost.weight": "model-00003-of-00002.safetensors",
        "d.scale": FIRST,
    }
    del weight_map["b.weight"]
    write_json(sharded / INDEX, {"weight_map": weight_map})
    (sharded / "config.json").unlink()
    found = "\n".join(problems_of(sharded))
    assert "config.json is missing" in found
    assert "model-00003-of-00002.safetensors: the file is missing" in found
    assert f"'ghost.weight' is not in {FIRST}, where the index places it" in found
    assert f"'d.scale' is in {SECOND}, not in {FIRST}" in found
    assert f"'b.weight' of {FIRST} is not in the index" in found
    assert "lost.weight" not in found  # its shard is already reported
    assert len(found.splitlines()) == 5


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    assert problems_of(sharded) == (f"{SECOND}: the file is missing",)


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_a_truncated_shard_is_named(sharded: Path, keep: int) -> None:
    whole = (sharded / FIRST).read_bytes()
    (sharded / FIRST).write_bytes(whole[:keep])
    (problem,) = problems_of(sharded)
    assert problem.startswith(f"{FIRST}: ")
    assert "truncated" in problem


def test_a_tensor_in_two_shards_is_a_problem(sharded: Path) -> None:
    save_file({"a.weight": torch.zeros(1)}, sharded / SECOND)
    assert any("is in both" in problem for problem in problems_of(sharded))


def test_unknown_dtypes_and_broken_headers_are_named(sharded: Path) -> None:
    header = json.dumps({"x": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (sharded / FIRST).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    assert "unknown dtype 'F3'" in problems_of(sharded)[0]
    (sharded / FIRST).write_bytes(struct.pack("<Q", 9) + b"not json!")
    assert "corrupt header" in problems_of(sharded)[0]


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/x.safetensors", "", 7])
def test_an_index_cannot_reach_outside_of_its_directory(sharded: Path, shard: Any) -> None:
    write_json(sharded / INDEX, {"weight_map": {"a.weight": shard}})
    assert "weight_map" in problems_of(sharded)[0]


def test_a_directory_without_weights_is_a_problem(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {})
    assert problems_of(tmp_path) == ("there is no *.safetensors file",)


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_shard_never_fails_in_another_way(tmp_path: Path, data: st.DataObject) -> None:
    folder = write_sharded(tmp_path)
    whole = bytearray((folder / FIRST).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (folder / FIRST).write_bytes(whole)
    try:
        checkpoint = SafetensorsCheckpoint(folder)
    except CheckpointError as error:
        found = error.problems
    else:
        found = ("opened",)
        assert set(checkpoint.names()) == set(tensors())
    assert found


def test_generation_defaults_list_all_end_ids(sharded: Path) -> None:
    assert SafetensorsCheckpoint(sharded).generation_config() == {"eos_token_id": [2]}
    write_json(sharded / "generation_config.json", {"eos_token_id": [5, 6], "temperature": 0.6})
    expected = {"eos_token_id": [5, 6], "temperature": 0.6}
    assert SafetensorsCheckpoint(sharded).generation_config() == expected
    (sharded / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config"):
        SafetensorsCheckpoint(sharded).generation_config()


def test_the_chat_template_is_found_in_all_its_places(sharded: Path) -> None:
    checkpoint = SafetensorsCheckpoint(sharded)
    assert checkpoint.chat_template() is None
    write_json(sharded / "tokenizer_config.json", {"chat_template": "plain"})
    assert checkpoint.chat_template() == "plain"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "named"}]
    write_json(sharded / "tokenizer_config.json", {"chat_template": named})
    assert checkpoint.chat_template() == "named"
    (sharded / "chat_template.jinja").write_text("own file")
    assert checkpoint.chat_template() == "own file"


def test_a_missing_tokenizer_is_named(sharded: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        SafetensorsCheckpoint(sharded).tokenizer()


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"x": ([2], 0, 8), "y": ([2], 12, 20)}, "'y' does not begin where the one before it ends"),
        ({"x": ([2], 0, 8), "y": ([3], 4, 16)}, "'y' does not begin where the one before it ends"),
        ({"x": ([2], 0, 12)}, r"F32 \[2\] does not fill bytes 0:12"),
        ({"x": ([-2], 0, -8)}, "is not made of whole numbers"),
        ({"x": ([True], 0, 4)}, "is not made of whole numbers"),
    ],
)
def test_tensors_fill_the_file_without_holes(
    tmp_path: Path, entries: dict[str, Any], problem: str
) -> None:
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        for name, (shape, start, end) in entries.items()
    }
    raw = json.dumps(header).encode()
    (tmp_path / FIRST).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(20))
    write_json(tmp_path / "config.json", {})
    (found,) = problems_of(tmp_path)
    assert re.search(problem, found)


def test_every_dtype_reads_back_from_any_address(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    names = sorted(name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype))
    raw = torch.randint(0, 2, (16,), generator=generator, dtype=torch.uint8)
    stored = {"a.odd": torch.ones(3, dtype=torch.uint8), "empty": torch.zeros(0, 4)}
    known = [dtype for name in names if (dtype := getattr(torch, name)) in DTYPES.values()]
    stored |= {f"b.{dtype}": raw.clone().view(dtype) for dtype in known}
    save_file(stored, tmp_path / FIRST)
    # The library pads headers; a header of odd length puts every tensor at an odd address.
    whole = (tmp_path / FIRST).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = whole[8 : 8 + length].rstrip() + b" " * (length % 2)
    header += b" " if len(header) % 2 == 0 else b""
    (tmp_path / FIRST).write_bytes(struct.pack("<Q", len(header)) + header + whole[8 + length :])
    write_json(tmp_path / "config.json", {})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, expected in stored.items():
        found = checkpoint.read(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.data_ptr() % found.dtype.itemsize == 0
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_writing_to_a_tensor_leaves_the_file_alone(sharded: Path) -> None:
    before = (sharded / FIRST).read_bytes()
    SafetensorsCheckpoint(sharded).read("a.weight").zero_()
    assert (sharded / FIRST).read_bytes() == before
    assert torch.equal(SafetensorsCheckpoint(sharded).read("a.weight"), tensors()["a.weight"])


def test_a_configuration_alone_has_no_tensors(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llama", "eos_token_id": 2})
    checkpoint = SafetensorsCheckpoint(tmp_path, config_only=True)
    assert (checkpoint.names(), checkpoint.total_bytes) == ((), 0)
    assert checkpoint.generation_config() == {"eos_token_id": [2]}
