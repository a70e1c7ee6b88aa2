"""Single ops over the native library, with the methods of core's references."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.ops.reference import Rope
from deepinfer_core.sampling.portable import exponentials
from deepinfer_cpu.memory import WeightMemory
from deepinfer_cpu.structs import DrawRow
from deepinfer_cpu.weights import PACKED_FORMATS, PackedWeight, pack


def rows_of(x: Tensor) -> Tensor:
    """``x`` in float32 with the numbers of a row side by side."""
    x = x if x.dtype == torch.float32 else x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Op:
    def __init__(self, library: Any) -> None:
        self._library = library


class NativeLinear(_Op):
    """``Linear`` over panels.

    Args:
        library: the native library.
        bits: of activations that may be rounded and meet 4 bit weights, 16 or 8; others have 16.
    """

    packed_formats = PACKED_FORMATS
    may_round = True

    def __init__(self, library: Any, bits: int = 16) -> None:
        super().__init__(library)
        self._bits, self._memory = bits, WeightMemory()

    def prepare(
        self,
        weight: Tensor | PackedTensor,
        bias: Tensor | None = None,
        *,
        may_round: bool = False,
    ) -> PackedWeight:
        """Repack; see the reference."""
        return pack(self._library, self._memory, weight, bias, bits=self._bits if may_round else 16)

    def run(self, x: Tensor, handle: PackedWeight) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        wide = rows_of(x)
        out = torch.empty(x.shape[0], handle.n)
        self._library.di_linear(
            handle.reference, wide.data_ptr(), wide.stride(0), x.shape[0], out.data_ptr(), handle.n
        )
        return out if x.dtype == torch.float32 else out.to(x.dtype)


class NativeEmbedding(_Op):
    """``Embedding`` from panels."""

    packed_formats = PACKED_FORMATS

    def __init__(self, library: Any, dtype: torch.dtype) -> None:
        super().__init__(library)
        self._dtype, self._memory = dtype, WeightMemory()

    def prepare(self, weight: Tensor | PackedTensor) -> PackedWeight:
        """Repack."""
        return pack(self._library, self._memory, weight)

    def run(self, token_ids: Tensor, handle: PackedWeight) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < handle.n:
            raise IndexError(f"token ids must lie within 0 and {handle.n - 1}")
        ids = token_ids.contiguous()
        out = torch.empty(ids.shape[0], handle.k)
        self._library.di_embedding(handle.reference, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out.to(self._dtype)


class SharedEmbedding(NativeEmbedding):
    """``Embedding`` from the panels of a linear, so that a tied head is kept once."""

    def from_linear(self, handle: PackedWeight) -> PackedWeight:
        """Share what the linear op packed."""
        return handle


class NativeRmsNorm(_Op):
    """``RmsNorm``."""

    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See the reference."""
        size = x.shape[-1]
        wide, scale = rows_of(x.reshape(-1, size)), weight.float().contiguous()
        out = torch.empty(wide.shape)
        self._library.di_rms_norm(
            wide.data_ptr(), wide.stride(0), scale.data_ptr(), eps, wide.shape[0], size,
            out.data_ptr(),
        )  # fmt: skip
        return out.view(x.shape).to(x.dtype)


class NativeAddRmsNorm(_Op):
    """``AddRmsNorm``, adding in place where the rows are float32."""

    def run(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See the reference; ``x`` may be overwritten with the sum."""
        if x.dtype != torch.float32:
            x.add_(delta)
            return x, NativeRmsNorm(self._library).run(x, weight, eps)
        rows, more, scale = rows_of(x), rows_of(delta), weight.float().contiguous()
        out = torch.empty(rows.shape)
        self._library.di_add_rms_norm(
            rows.data_ptr(), rows.stride(0), more.data_ptr(), more.stride(0), scale.data_ptr(),
            eps, rows.shape[0], rows.shape[1], out.data_ptr(),
        )  # fmt: skip
        return rows, out


class NativeRope(_Op):
    """``Rope`` with halves; interleaved pairs go through core's reference."""

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        """See the reference."""
        if interleaved or x.dtype == torch.float64:
            turned: Tensor = Rope().run(x, cos, sin, interleaved=interleaved)
            return turned
        wide, cos, sin = rows_of(x), cos.float().contiguous(), sin.float().contiguous()
        num_rows, heads, size = wide.shape
        out = torch.empty(wide.shape)
        self._library.di_rope(
            wide.data_ptr(), wide.stride(0), wide.stride(1), cos.data_ptr(), sin.data_ptr(),
            num_rows, heads, size, cos.shape[1], out.data_ptr(),
        )  # fmt: skip
        return out.to(x.dtype)


class NativeSiluMul(_Op):
    """``SiluMul``."""

    def run(self, gate_up: Tensor) -> Tensor:
        """See the reference."""
        wide = rows_of(gate_up)
        rows, size = wide.shape[0], wide.shape[1] // 2
        out = torch.empty(rows, size)
        self._library.di_silu_mul(wide.data_ptr(), wide.stride(0), rows, size, out.data_ptr())
        return out.to(gate_up.dtype)


class NativeDraw(_Op):
    """``Draw``: the same tokens, without looking at what cannot be drawn."""

    @cached_property
    def _table(self) -> Tensor:
        return torch.tensor(exponentials(), dtype=torch.float64)

    def run(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
        keys: Tensor,
    ) -> Tensor:  # fmt: skip
        """See the reference."""
        wide = rows_of(logits)
        knobs = zip(
            temperature.tolist(), top_p.tolist(), min_p.tolist(), top_k.tolist(), keys.tolist(),
            strict=True,
        )  # fmt: skip
        params = (DrawRow * wide.shape[0])(*(DrawRow(*row) for row in knobs))
        out = torch.empty(wide.shape[0], dtype=torch.int64)
        self._library.di_draw(
            wide.data_ptr(), wide.stride(0), *wide.shape, params, self._table.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out
