"""Locks: written, read back, compared, and exchanged between processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from deepinfer_core.components import Slot
from deepinfer_core.compose import compose
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import LockMismatch
from deepinfer_core.lock import Lock, dumps, handshake, loads, lock_of, read_lock
from deepinfer_core.plugins import PluginHost
from deepinfer_core.testing.plugins import least_plugin, offer, plugin


def lock_for(*plugins: object, **config: Any) -> Lock:
    host = PluginHost([least_plugin(), *plugins], discover=False, builtin=False)
    plan = compose(host, EngineConfig(**config), node_exists=lambda path: False)
    return lock_of(plan, host)


def test_written_lock_reads_back_equal() -> None:
    lock = lock_for(plugin("acme", offer(Slot.CACHE, "acme")))
    assert loads(dumps(lock), "text") == lock
    assert lock.slots["cache"] == ("acme (acme)",)


def test_equal_compositions_have_equal_locks() -> None:
    lock_for().verify(lock_for())


def test_every_difference_is_listed() -> None:
    locked = lock_for()
    here = lock_for(plugin("acme", offer(Slot.CACHE, "acme")), seed=3)
    with pytest.raises(LockMismatch) as caught:
        locked.verify(attrs.evolve(here, api=2))
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "hook API",
        "plugin acme",
        "slot cache",
        "options",
    ]
    assert "locked pages (least), here acme (acme)" in str(caught.value)


def test_difference_of_the_model_alone() -> None:
    lock = lock_for()
    other = attrs.evolve(lock, composition_hash="0" * 32)
    assert lock.differences(other) == ["model: not the one that the lock was made with"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has lock format None"),
        ("format = 2\n", "has lock format 2"),
        ("format = 1\n", "is no lock"),
        ("format = \n", "is no lock"),
        ("format = 1\nplugins = 5\n", "is no lock"),
    ],
)
def test_file_that_is_no_lock(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "deepinfer.lock"
    path.write_text(text)
    with pytest.raises(LockMismatch, match=message):
        read_lock(path)


def test_missing_lock(tmp_path: Path) -> None:
    with pytest.raises(LockMismatch, match="cannot read the lock"):
        read_lock(tmp_path / "missing.lock")


# ------------------------------------------------------------------------------ two processes


WORKER = """
import sys
from deepinfer_core.compose import compose
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import LockMismatch
from deepinfer_core.lock import handshake, lock_of
from deepinfer_core.plugins import PluginHost
from deepinfer_core.testing.plugins import least_plugin

host = PluginHost([least_plugin()], discover=False, builtin=False)
plan = compose(host, EngineConfig(seed=int(sys.argv[1])), node_exists=lambda path: False)

def send(message):
    sys.stdout.buffer.write(message + b"\\n")
    sys.stdout.buffer.flush()

try:
    handshake(lock_of(plan, host), send, sys.stdin.buffer.readline, peer="host")
except LockMismatch as error:
    send(str(error).encode().replace(b"\\n", b"|"))
else:
    send(b"agreed")
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_two_processes_compare_compositions(seed: int) -> None:
    command = [sys.executable, "-c", WORKER, str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def send(message: bytes) -> None:
            stdin.write(message + b"\n")
            stdin.flush()

        if seed == 0:
            handshake(lock_for(), send, stdout.readline)
            assert stdout.readline() == b"agreed\n"
        else:
            with pytest.raises(LockMismatch, match="peer composed another engine"):
                handshake(lock_for(), send, stdout.readline)
            assert stdout.readline().startswith(b"host composed another engine")
    assert process.returncode == 0


@pytest.mark.parametrize("answer", [b"", b"{}", b"[1]", b"\xff", json.dumps({"x": 1}).encode()])
def test_peer_that_speaks_something_else(answer: bytes) -> None:
    with pytest.raises(LockMismatch, match="does not speak"):
        handshake(lock_for(), lambda message: None, lambda: answer)


def test_peer_that_hangs_up() -> None:
    def closed() -> bytes:
        raise EOFError

    with pytest.raises(LockMismatch, match="worker 3 hung up"):
        handshake(lock_for(), lambda message: None, closed, peer="worker 3")
