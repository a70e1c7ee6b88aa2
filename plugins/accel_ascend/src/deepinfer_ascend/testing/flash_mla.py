"""What flash_mla's documentation says that its sparse forward pass computes, on CPU tensors.

Written from the documentation of version 1.0.0 and its description of the algorithm. It is an op of
torch, so that recordings see it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

NAMESPACE = "flash_mla"

_SCHEMA = (
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, "
    "Tensor? attn_sink, Tensor? topk_length) -> (Tensor, Tensor, Tensor)"
)
"""That of the compiled half, which the library's Python calls."""

_INSTALLED: list[torch.library.Library] = []
_REAL: list[Library] = []


class Library(Protocol):
    """The part of module ``flash_mla`` that is called."""

    def flash_mla_sparse_fwd(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        sm_scale: float,
        d_v: int = 512,
        attn_sink: Tensor | None = None,
        topk_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(out, largest scores, logarithms of denominators without sinks)."""
        ...


def install() -> None:
    """Register the compiled half for CPU tensors; further calls change nothing."""
    if _INSTALLED:
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("sparse_prefill_fwd", sparse_prefill_fwd, "CPU")
    _INSTALLED.append(library)


def library() -> Library:
    """Stands in for the module; see ``put_under_the_real_one``."""
    install()
    return _REAL[0] if _REAL else _StandIn()


class _StandIn:
    """As ``Library``; keyword names and defaults are those of version 1.0.0."""

    def flash_mla_sparse_fwd(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        sm_scale: float,
        d_v: int = 512,
        attn_sink: Tensor | None = None,
        topk_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Library``."""
        found: tuple[Tensor, Tensor, Tensor] = compiled().sparse_prefill_fwd(
            q, kv, indices, sm_scale, d_v, attn_sink, topk_length
        )
        return found


def compiled() -> Any:
    """The emulated compiled half."""
    install()
    return getattr(torch.ops, NAMESPACE)


def put_under_the_real_one() -> str:
    """Let ``library`` be the installed flash_mla, its compiled half replaced by the emulation.

    Without an Ascend device node it asks for a half named "cuda".

    Returns:
        Its version.

    Raises:
        ImportError: flash_mla is not installed.
    """
    half: Any = ModuleType("flash_mla.cuda")
    half.sparse_prefill_fwd = compiled().sparse_prefill_fwd
    sys.modules["flash_mla.cuda"] = half
    found: Any = importlib.import_module("flash_mla")
    _REAL[:] = [found]
    return str(found.__version__)


def sparse_prefill_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each row to the vectors that its indices name, in float64.

    Rows without any give zero, -inf and +inf. Indices below zero or beyond the vectors name
    nothing; of a sink only the output knows.
    """
    assert topk_length is None
    assert d_v == kv.shape[2] == q.shape[2]
    assert indices.dtype == torch.int32
    places = indices[:, 0].long()
    valid = (places >= 0) & (places < kv.shape[0])
    # What is not named is not read: it may be anything, NaN included.
    keys = kv[:, 0].index_select(0, places.masked_fill(~valid, 0).flatten())
    keys = keys.view(*places.shape, -1).double().masked_fill(~valid.unsqueeze(-1), 0)
    scores = torch.einsum("nhd,nmd->nhm", q.double(), keys) * sm_scale
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    sums = scores.logsumexp(-1)
    denominators = sums
    if attn_sink is not None:
        denominators = torch.logaddexp(sums, attn_sink.double())
    empty = ~valid.any(-1)
    weights = (scores - denominators.unsqueeze(-1)).exp()
    weights = weights.masked_fill(empty.view(-1, 1, 1), 0)
    out = torch.einsum("nhm,nmd->nhd", weights, keys[..., :d_v])
    lse = sums.masked_fill(empty.unsqueeze(1), torch.inf)
    return out.to(q.dtype), scores.amax(-1).float(), lse.float()
