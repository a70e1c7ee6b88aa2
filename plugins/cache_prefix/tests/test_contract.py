"""Cache ``prefix`` keeps the laws of its slot."""

from __future__ import annotations

from deepinfer_core.testing.contracts import CacheContract


class TestPrefix(CacheContract):
    component = "prefix"
