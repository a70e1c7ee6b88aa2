"""The namespace of pages: what changes it, and what is read for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deepinfer_core.engine.namespace import content_of, identity_of, namespace_of


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("text")
    return folder


def change(file: Path, data: bytes) -> None:
    """Write as many bytes again, with another time of change."""
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))


def test_names_and_values_count_and_their_order_does_not() -> None:
    assert namespace_of([("a", 1), ("b", 2)]) == namespace_of([("b", 2), ("a", 1)])
    assert len({namespace_of([("a", 1)]), namespace_of([("a", "1")]), namespace_of([])}) == 3


def test_weights_of_the_same_shape_differ(checkpoint: Path, tmp_path: Path) -> None:
    before = content_of(checkpoint, tmp_path / "memory.json")
    assert sorted(before) == ["config.json", "model.safetensors"]
    change(checkpoint / "model.safetensors", b"WEIGHTS")
    after = content_of(checkpoint, tmp_path / "memory.json")
    assert before["config.json"] == after["config.json"]
    assert before["model.safetensors"] != after["model.safetensors"]


def test_a_copy_elsewhere_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in checkpoint.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    memory = tmp_path / "memory.json"
    assert content_of(checkpoint, memory) == content_of(other, memory)
    assert identity_of(checkpoint) != identity_of(other)


def test_what_was_read_is_remembered(checkpoint: Path, tmp_path: Path) -> None:
    memory = tmp_path / "cache" / "memory.json"
    found = content_of(checkpoint / "model.safetensors", memory)
    known = json.loads(memory.read_text())
    (entry,) = known.values()
    assert entry[-1] == found["model.safetensors"]
    entry[-1] = "remembered"
    memory.write_text(json.dumps(known))
    assert content_of(checkpoint / "model.safetensors", memory) == {
        "model.safetensors": "remembered"
    }


@pytest.mark.parametrize("text", ["", "[]", '{"a": 3}', "{"])
def test_a_damaged_memory_is_read_again(checkpoint: Path, tmp_path: Path, text: str) -> None:
    memory = tmp_path / "memory.json"
    expected = content_of(checkpoint, memory)
    memory.write_text(text)
    assert content_of(checkpoint, memory) == expected


def test_a_memory_that_cannot_be_written_is_done_without(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert content_of(checkpoint, tmp_path / "file" / "memory.json")
