"""The builtin device-side components, found as any plugin's are, keep their contracts."""

from __future__ import annotations

from deepinfer_core.capabilities import Feature
from deepinfer_core.testing.contracts import (
    AcceleratorContract,
    AttentionContract,
    CacheContract,
    CheckpointContract,
    EvictionContract,
    KernelsContract,
    ModelContract,
)
from deepinfer_core.testing.contracts.paged_model import PagedModelContract


class TestDecoder(ModelContract):
    component = "decoder"


class TestDecoderOnPages(PagedModelContract):
    """The other way to run a model's laws finds the same of a model that serves both."""

    component = "decoder"


class TestSafetensors(CheckpointContract):
    component = "safetensors"


class TestGguf(CheckpointContract):
    component = "gguf"


class TestCpu(AcceleratorContract):
    component = "cpu"


class TestTorchKernels(KernelsContract):
    component = "torch"


class TestPagedAttention(AttentionContract):
    component = "paged"


class TestPagedAttentionWhereRowsMayDepend(AttentionContract):
    component = "paged"
    offers = frozenset({Feature.WINDOW, Feature.SINKS})  # what batch_invariant = false leaves


class TestLru(EvictionContract):
    component = "lru"


class TestPages(CacheContract):
    component = "pages"
    histories = 10  # test_contracts_device searches longer
