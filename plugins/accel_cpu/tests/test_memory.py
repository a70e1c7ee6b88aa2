"""Memory is there before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("deepinfer_cpu")

from deepinfer_cpu.memory import populate

IS_IT_BACKED = """
import ctypes
import mmap
import torch
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_cpu import kv_storage

def backed(address, num_bytes):
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (address + num_bytes - start) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * count)()
    look = ctypes.CDLL(None).mincore
    look.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert look(start, count * mmap.PAGESIZE, ctypes.addressof(found)) == 0
    return sum(entry & 1 for entry in found) / count

group = CacheGroupSpec(
    name="full", layers=(0, 1), num_kv_heads=4, key_dim=64, value_dim=64, page_size=64
)
kv_storage.POPULATED_BYTES = 32 * group.bytes_per_page
storage = kv_storage.KvStorage(group, 1024, torch.device("cpu"))
storage.populating.join()
layer_bytes = storage.keys[0].nbytes
for layer in (*storage.keys, *storage.values):
    first = backed(layer.data_ptr(), layer_bytes // 32)
    later = backed(layer.data_ptr() + layer_bytes // 8, layer_bytes // 2)
    assert first == 1.0 and later < 0.1, (first, later)
"""


def ends_well(program: str) -> None:
    """In a process of its own, where no memory is handed out a second time."""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is backed")
def test_the_first_pages_are_backed() -> None:
    ends_well(IS_IT_BACKED)


ENDS_MEANWHILE = """
import time
import torch
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_cpu import kv_storage

def slow(regions):
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        torch.zeros(8)[:4].data_ptr()

kv_storage.populate = slow
group = CacheGroupSpec(
    name="full", layers=(0,), num_kv_heads=1, key_dim=8, value_dim=8, page_size=16
)
kept = kv_storage.KvStorage(group, 4, torch.device("cpu"))
"""


def test_a_process_may_end_meanwhile() -> None:
    ends_well(ENDS_MEANWHILE)


def test_what_is_there_stays() -> None:
    here = torch.arange(1 << 16)
    populate([(here.data_ptr() + 8, here.nbytes - 8), (here.data_ptr(), 5), (0, 0)])
    assert torch.equal(here, torch.arange(1 << 16))
