"""Sparse attention of DeepSeek's models through flash_mla's Ascend build.

``LatentRows`` is op "latent_attention": vectors of the cache, in bfloat16, go to
flash_mla_sparse_fwd. ``attend`` is the call for caches in records of 528 and 288 bytes, which no
model keeps so far: a contract only. Both stand behind the conditions that flash_mla's source and
documentation state; it checks only some of them itself.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_ascend.errors import require
from deepinfer_core.interfaces.kernels import LatentVectors

DIM = 512
"""Numbers of a vector, which is key and value at once."""

MAIN_BYTES = 528
"""512 of E4M3, then 16 of E8M0: one scale for every 32."""

EXTRA_BYTES = 288
"""256 of E2M1 in pairs, the even one in the lower half, then 32 scales of E4M3 for 16 each."""

HEADS = 64
"""The only number of query heads that the Ascend build has."""

BLOCK = 64
"""Vectors that the kernel takes at a time; lists of them are filled up to a multiple."""

VERSION = "1"
"""Of flash_mla; what its calls were written for."""

_LARGEST = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@frozen(kw_only=True, eq=False)
class SparseCache:
    """Vectors in records, and which of them each query sees.

    Attributes:
        records: [num_pages, page_size, 1, bytes], uint8.
        indices: [batch, rows, n], int32: ``page * page_size + offset``, -1 = nothing.
    """

    records: Tensor
    indices: Tensor


def why_not() -> str | None:
    """Why flash_mla cannot be used here, or None; does not import it."""
    found = importlib.util.find_spec("flash_mla")
    if found is None:
        return (
            "flash_mla is not installed; its Ascend build comes from source (deepinfer-flashmla) "
            "and assumes an aarch64 host"
        )
    version = metadata.version("deepinfer-flashmla")
    if version.partition(".")[0] != VERSION:
        return f"flash_mla {version} is installed; calls were written for {VERSION}.x"
    folders = found.submodule_search_locations or ()
    if not any(list(Path(folder).glob("npu*.so")) for folder in folders):
        return (
            "flash_mla is installed without its Ascend build; set "
            "FLASH_MLA_BUILD_TARGET_PLATFORM=ASCEND when it is built"
        )
    return None


class LatentRows:
    """``LatentAttention``: what rows see is gathered into one memory, as the library wants it.

    Args:
        library: module ``flash_mla``.
        dtypes: of queries and vectors.
    """

    def __init__(self, library: Any, dtypes: Sequence[torch.dtype] = (torch.bfloat16,)) -> None:
        self._library, self._dtypes = library, tuple(dtypes)

    def serves(self, num_heads: int, dim: int) -> bool:
        """Whether the Ascend build has such heads."""
        return (num_heads, dim) == (HEADS, DIM)

    def run(
        self, q: Tensor, seen: Sequence[LatentVectors], *, scale: float, sinks: Tensor
    ) -> Tensor:
        """See ``deepinfer_core.interfaces.kernels.LatentAttention``."""
        vectors, indices = joined(seen)
        if not vectors.shape[0]:
            return torch.zeros_like(q)
        return attend_vectors(
            self._library, q, vectors, indices, scale=scale, sinks=sinks, dtypes=self._dtypes
        )


def joined(seen: Sequence[LatentVectors]) -> tuple[Tensor, Tensor]:
    """Vectors that any row sees, each once, and where those of each row are.

    Returns:
        [count, dim], and [n, m] int32 with -1 for nothing, m a multiple of ``BLOCK``.
    """
    vectors, columns, count = [], [], 0
    for part in seen:
        visible = ~part.hidden
        slots, places = torch.unique(part.slots[visible], return_inverse=True)
        indices = torch.full_like(part.slots, -1, dtype=torch.int32)
        indices[visible] = (places + count).int()
        vectors.append(part.vectors.index_select(0, slots))
        columns.append(indices)
        count += slots.shape[0]
    listed = torch.cat(columns, 1)
    beyond = -listed.shape[1] % BLOCK
    return torch.cat(vectors), functional.pad(listed, (0, beyond), value=-1)


def attend_vectors(
    library: Any,
    q: Tensor,
    vectors: Tensor,
    indices: Tensor,
    *,
    scale: float,
    sinks: Tensor,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> Tensor:
    """Attention of each row to the vectors that its indices name; zero where they name none.

    Args:
        library: module ``flash_mla``.
        q: [n, 64, 512], bfloat16.
        vectors: [count, 512], bfloat16.
        indices: [n, m], int32; -1 = nothing.
        scale: factor on scores.
        sinks: [64], float32: a logit in the denominator of each head.
        dtypes: of queries and vectors.
    """
    op = "flash_mla_sparse_fwd"
    fits = q.dim() == 3 and q.shape[1:] == (HEADS, DIM) and q.dtype in dtypes
    require(fits, op, f"q is {q.dtype} {list(q.shape)}; bfloat16 [rows, {HEADS}, {DIM}]")
    fits = vectors.dim() == 2 and vectors.shape[1] == DIM and vectors.dtype == q.dtype
    what = f"kv is {vectors.dtype} {list(vectors.shape)}, not of the queries' dtype"
    require(fits, op, f"{what}; engine.kv_dtype must be 'auto'")
    fits = indices.dim() == 2 and indices.shape[0] == q.shape[0] and indices.dtype == torch.int32
    require(fits, op, f"indices are {indices.dtype} {list(indices.shape)}; int32, a row a query")
    require(indices.shape[1] % BLOCK == 0, op, f"{indices.shape[1]} indices a row, not of {BLOCK}")
    fits = sinks.shape == (HEADS,) and sinks.dtype == torch.float32
    require(fits, op, f"attn_sink is {sinks.dtype} {list(sinks.shape)}")
    out: Tensor = library.flash_mla_sparse_fwd(
        q.contiguous(), vectors.unsqueeze(1).contiguous(), indices.unsqueeze(1).contiguous(),
        scale, d_v=DIM, attn_sink=sinks.contiguous(),
    )[0]  # fmt: skip
    return out


class OwnLatentAttention:
    """``LatentAttention`` that leaves the work to the model, in plain torch on the device."""

    def serves(self, num_heads: int, dim: int) -> bool:
        """Never."""
        return False

    def run(
        self, q: Tensor, seen: Sequence[LatentVectors], *, scale: float, sinks: Tensor
    ) -> Tensor:
        """Not asked."""
        raise NotImplementedError


def pack_main(x: Tensor) -> Tensor:
    """[n, 512] -> [n, 528] uint8: each block divided by the least power of two that lets it fit."""
    _check_vectors(x)
    blocks = x.float().unflatten(-1, (-1, 32))
    most = blocks.abs().amax(-1).clamp(min=1e-4)
    exponent = torch.ceil(torch.log2(most / _LARGEST))
    numbers = (blocks * torch.exp2(-exponent).unsqueeze(-1)).flatten(-2)
    codes = numbers.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([codes, (exponent + 127).to(torch.uint8)], -1)


def unpack_main(records: Tensor) -> Tensor:
    """Inverse of ``pack_main``, float32."""
    codes, scales = records.split([DIM, DIM // 32], -1)
    powers = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    return codes.contiguous().view(torch.float8_e4m3fn).float() * powers


def pack_extra(x: Tensor) -> Tensor:
    """[n, 512] -> [n, 288] uint8."""
    _check_vectors(x)
    blocks = x.float().unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 6).clamp(min=2.0**-9, max=_LARGEST).to(torch.float8_e4m3fn)
    numbers = (blocks / scales.float().unsqueeze(-1)).flatten(-2)
    table = torch.tensor(_E2M1, device=x.device)
    codes = (numbers.abs().unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)
    codes |= (numbers < 0).to(torch.uint8) << 3
    return torch.cat([codes[..., ::2] | codes[..., 1::2] << 4, scales.view(torch.uint8)], -1)


def unpack_extra(records: Tensor) -> Tensor:
    """Inverse of ``pack_extra``, float32."""
    pairs, scales = records.split([DIM // 2, DIM // 16], -1)
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).int()
    table = torch.tensor(_E2M1, device=records.device)
    numbers = torch.where(codes > 7, -table[codes & 7], table[codes & 7])
    wide = scales.contiguous().view(torch.float8_e4m3fn).float()
    return numbers * wide.repeat_interleave(16, -1)


def attend(
    q: Tensor, cache: SparseCache, *, sinks: Tensor, extra: SparseCache | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of each query to the vectors that its indices name.

    Args:
        q: [batch, rows, 64, 512], bfloat16, scaled by its maker.
        cache: vectors of windows, records of 528 bytes.
        sinks: [64], float32: a logit in the denominator of each head.
        extra: compressed vectors besides, records of 528 or 288 bytes.

    Returns:
        [batch, rows, 64, 512] bfloat16, and the logarithm of each denominator, float32,
        [batch, 64, rows]; +inf where a query sees nothing.
    """
    op = "flash_mla_with_kvcache"
    fits = q.dim() == 4 and q.shape[2:] == (HEADS, DIM) and q.dtype == torch.bfloat16
    require(fits, op, f"q is {q.dtype} {list(q.shape)}; bfloat16 [batch, rows, {HEADS}, {DIM}]")
    fits = sinks.shape == (HEADS,) and sinks.dtype == torch.float32
    require(fits, op, f"attn_sink is {sinks.dtype} {list(sinks.shape)}")
    _check_cache(op, "k_cache", cache, q, (MAIN_BYTES,))
    more: dict[str, Any] = {}
    if extra is not None:
        _check_cache(op, "extra_k_cache", extra, q, (MAIN_BYTES, EXTRA_BYTES))
        more = {"extra_k_cache": extra.records, "extra_indices_in_kvcache": extra.indices}
    flash_mla = importlib.import_module("flash_mla")
    # Made anew each time: it may be reused only while nothing that it was made for changes.
    schedule = flash_mla.get_mla_metadata()[0]
    out, denominators = flash_mla.flash_mla_with_kvcache(
        q, cache.records, None, None, DIM, schedule, indices=cache.indices, attn_sink=sinks, **more
    )
    return out, denominators


def _check_vectors(x: Tensor) -> None:
    require(x.shape[-1] == DIM, "flash_mla", f"vectors of {x.shape[-1]} numbers, not {DIM}")


def _check_cache(op: str, name: str, cache: SparseCache, q: Tensor, sizes: tuple[int, ...]) -> None:
    records, indices = cache.records, cache.indices
    fits = records.dim() == 4 and records.shape[2] == 1 and records.shape[3] in sizes
    require(fits, op, f"{name} is {list(records.shape)}; [pages, size, 1, {sizes}]")
    plain = records.dtype == torch.uint8 and records.is_contiguous()
    require(plain, op, f"{name} is {records.dtype}, or not contiguous; uint8")
    fits = indices.dim() == 3 and indices.shape[:2] == q.shape[:2] and indices.dtype == torch.int32
    require(fits, op, f"indices of {name} are {indices.dtype} {list(indices.shape)}")


def check_indices(cache: SparseCache) -> None:
    """Look at every index; reads back from the device, so for tests and for finding faults.

    Raises:
        CallError: one would be read out of bounds.
    """
    room = cache.records.shape[0] * cache.records.shape[1]
    good = ((cache.indices >= -1) & (cache.indices < room)).all()
    require(bool(good), "flash_mla_with_kvcache", f"an index beyond -1..{room - 1}")
