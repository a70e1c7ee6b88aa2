"""Every store of this plugin keeps the contract of its slot."""

from __future__ import annotations

from deepinfer_core.testing.contracts import KvStoreContract
from deepinfer_prefix.tiers.configs import DiskConfig, HostConfig, TieredConfig

SMALL = DiskConfig(quota_bytes=1 << 22, segment_bytes=1 << 18)


class TestHost(KvStoreContract):
    component = "host"


class TestFullHost(KvStoreContract):
    component = "host"
    config = HostConfig(quota_bytes=1 << 20)


class TestDisk(KvStoreContract):
    component = "disk"


class TestFullDisk(KvStoreContract):
    component = "disk"
    config = SMALL


class TestTiered(KvStoreContract):
    component = "tiered"
    config = TieredConfig(host=HostConfig(quota_bytes=1 << 20), disk=SMALL)
