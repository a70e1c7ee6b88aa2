"""Any history of a store: put, get, expire, delete, end, kill, damage."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from deepinfer_core.interfaces.kv_store import KvStore, KvStoreContext
from deepinfer_core.testing.stateful_kv_store import run_store_history
from deepinfer_prefix.tiers.configs import DiskConfig, HostConfig, TieredConfig
from deepinfer_prefix.tiers.disk import DiskStore
from deepinfer_prefix.tiers.host import HostStore
from deepinfer_prefix.tiers.tiered import build as build_tiered

DISKS = {
    "roomy": DiskConfig(segment_bytes=9000),
    "full": DiskConfig(segment_bytes=4000, quota_bytes=12_000),
    "impatient": DiskConfig(segment_bytes=4000, expire_after_s=3600.0, bucket_s=600.0),
}


def killed(store: KvStore, folder: Path, after: Path) -> None:
    shutil.copytree(folder, after)


def damaged(folder: Path, random: Random) -> None:
    for file in sorted((folder / "segments").iterdir()):
        raw = bytearray(file.read_bytes())
        kind = random.randrange(3)
        if kind == 0:
            raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
        elif kind == 1:
            del raw[random.randrange(len(raw)) :]
        file.write_bytes(raw)


@pytest.mark.parametrize("quota_bytes", [1 << 20, 7000])
def test_host(quota_bytes: int) -> None:
    config = HostConfig(quota_bytes=quota_bytes)
    run_store_history(lambda context: HostStore(config, context), lossless=False)


@pytest.mark.parametrize("name", DISKS)
def test_disk(name: str) -> None:
    def make(context: KvStoreContext) -> KvStore:
        return DiskStore(DISKS[name], context)

    run_store_history(make, crash=killed, damage=damaged, examples=25, lossless=name == "roomy")


def test_tiered() -> None:
    config = TieredConfig(host=HostConfig(quota_bytes=5000), disk=DISKS["roomy"])

    def make(context: KvStoreContext) -> KvStore:
        return build_tiered(config, context)

    run_store_history(make, crash=killed, damage=damaged, examples=25, lossless=True)
