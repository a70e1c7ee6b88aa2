"""The namespace of pages: a digest of everything that makes the pages of two engines differ.

It covers what the weights *contain*, so that a fine-tuned model of the same shape never uses pages
of its base model. Reading all weights takes a while; digests of files are remembered by path, size,
time of change and inode.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepinfer_core.log import get_logger

SUFFIXES = frozenset({".gguf", ".json", ".model", ".safetensors", ".txt"})
"""Files of a checkpoint's directory that count: weights, configuration, tokenizer."""

_CHUNK = 1 << 20


def namespace_of(facts: Iterable[tuple[str, object]]) -> str:
    """Return the digest of named facts, as hexadecimal digits.

    Args:
        facts: names and values; values must have a ``repr`` that says all that matters.
    """
    text = repr(sorted((name, repr(value)) for name, value in facts))
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"deepinfer space").hexdigest()


def content_of(path: Path, memory: Path) -> Mapping[str, str]:
    """Return the digest of each file of a checkpoint, by its name.

    Args:
        path: the checkpoint, a file or a directory.
        memory: JSON file that remembers digests; made if missing, and only ever an optimisation.
    """
    files = [path] if path.is_file() else _files_in(path)
    known = _recall(memory)
    stamps = {str(file.resolve()): _stamp(file) for file in files}
    with ThreadPoolExecutor(max_workers=4) as pool:
        news = [name for name, stamp in stamps.items() if known.get(name, [None])[:-1] != stamp]
        for name, digest in zip(news, pool.map(_digest, news), strict=True):
            known[name] = [*stamps[name], digest]
    if news:
        _remember(memory, known)
    return {file.name: known[str(file.resolve())][-1] for file in files}


def identity_of(path: Path) -> Mapping[str, Any]:
    """Return what tells the files of a checkpoint apart without reading them.

    Enough for pages that do not outlive the process.
    """
    files = [path] if path.is_file() else _files_in(path)
    return {str(file.resolve()): _stamp(file) for file in files}


def _files_in(directory: Path) -> list[Path]:
    found = (file for file in directory.iterdir() if file.suffix in SUFFIXES and file.is_file())
    return sorted(found)


def _stamp(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _digest(name: str) -> str:
    state = hashlib.blake2b(digest_size=32)
    with Path(name).open("rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def _recall(memory: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(memory.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {name: entry for name, entry in known.items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 4 and isinstance(entry[-1], str)


def _remember(memory: Path, known: Mapping[str, list[Any]]) -> None:
    kept = {name: entry for name, entry in known.items() if Path(name).exists()}
    draft = memory.with_name(f"{memory.name}.{os.getpid()}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(kept), "utf-8")
        draft.replace(memory)
    except OSError as error:  # the next start reads the weights again
        get_logger("engine").info("namespace.not_remembered", error=str(error))
