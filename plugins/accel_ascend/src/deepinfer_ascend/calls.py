"""Every call into torch_npu, each behind a check of what its documentation asks for.

Nothing else in this package names an op of the device. The checks come before the call, since
torch_npu's own find few mistakes: a wrong page size, mask or scale would be wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer_ascend.errors import require
from deepinfer_ascend.soc import Soc

FP8_E4M3, FP4_E2M1, E8M0, BFLOAT16, FLOAT16 = 292, 296, 293, 15, 5
"""Numbers that torch_npu and torch give to dtypes."""

MX_BLOCK = 32
"""Numbers that share a scale."""

MASK_SIZE = 2048
"""Rows and columns of the triangle that fused attention takes for a causal mask."""

NO_MASK, CAUSAL = 0, 3
"""Kinds of mask: none or a whole one, and aligned at the last query and key."""

_PAGED = "contiguous [pages, size, heads, dim]"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_ENUM = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class Calls:
    """The ops.

    Args:
        soc: limits of the chip.
    """

    def __init__(self, soc: Soc) -> None:
        self.soc = soc
        self._attention_dtypes = tuple(getattr(torch, name) for name in soc.attention_dtypes)

    # ------------------------------------------------------------------------------ single rows

    def rms_norm(self, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        """Norm of the last dimension; x: [..., n], gamma: [n]."""
        _check_norm("npu_rms_norm", x, gamma)
        out: Tensor = _npu().npu_rms_norm(x.contiguous(), gamma, eps)[0]
        return out

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, gamma: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        op = "npu_add_rms_norm"
        _check_norm(op, x, gamma)
        same = x.shape == delta.shape and x.dtype == delta.dtype
        require(same, op, f"x1 is {_of(x)}, x2 is {_of(delta)}")
        normed, _, total = _npu().npu_add_rms_norm(x.contiguous(), delta.contiguous(), gamma, eps)
        return total, normed

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """Rotary embedding of all of a head.

        Args:
            x: [num_tokens, num_heads, head_dim].
            cos: [num_tokens, head_dim], dtype of ``x``, each cosine twice as ``interleaved`` has
                it.
            sin: likewise.
            interleaved: pairs are neighbours, not halves.
        """
        op = "npu_rotary_mul"
        require(x.dim() == 3 and x.dtype in _FLOATS, op, f"input is {_of(x)}")
        tokens, heads, dim = x.shape
        for name, table in (("r1", cos), ("r2", sin)):
            fits = table.shape == (tokens, dim) and table.dtype == x.dtype
            require(fits, op, f"{name} is {_of(table)} for an input {_of(x)}")
        require(dim % 2 == 0 and dim < 896, op, f"head_dim {dim} is odd or not below 896")
        require(heads < 1000, op, f"{heads} heads, not below 1000")
        mode = "interleave" if interleaved else "half"
        out: Tensor = _npu().npu_rotary_mul(
            x.contiguous().unsqueeze(0), cos.view(1, tokens, 1, dim), sin.view(1, tokens, 1, dim),
            rotary_mode=mode,
        )  # fmt: skip
        return out.squeeze(0)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up; [n, 2 * m], gate first."""
        _check_halves("npu_swiglu", gate_up)
        out: Tensor = _npu().npu_swiglu(gate_up.contiguous(), dim=-1)
        return out

    def clipped_swiglu(self, gate_up: Tensor, alpha: float, limit: float, offset: float) -> Tensor:
        """``GatedActivation`` of [n, 2 * m], gate first."""
        op = "npu_clipped_swiglu"
        _check_halves(op, gate_up)
        require(limit > 0, op, f"limit {limit} is not above 0")
        out: Tensor = _npu().npu_clipped_swiglu(
            gate_up.contiguous(), dim=-1, alpha=alpha, limit=limit, bias=offset, interleaved=False
        )
        return out

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) * up in the tanh form; [n, 2 * m] of at most 1024 columns."""
        op = "npu_gelu_mul"
        _check_halves(op, gate_up)
        require(gate_up.shape[-1] <= GELU_COLUMNS, op, f"input is {_of(gate_up)}: too wide")
        out: Tensor = _npu().npu_gelu_mul(gate_up, approximate="tanh")
        return out

    # ----------------------------------------------------------------------------------- experts

    def gate(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Softmax, then the largest: (weights [n, top_k], ids [n, top_k] int32)."""
        op = "npu_moe_gating_top_k_softmax"
        require(logits.dim() == 2 and logits.dtype in _FLOATS, op, f"x is {_of(logits)}")
        experts = logits.shape[1]
        require(0 < top_k <= min(experts, 1024), op, f"k is {top_k} of {experts} experts")
        weights, ids, _ = _npu().npu_moe_gating_top_k_softmax(logits.contiguous(), None, top_k)
        return weights, ids

    def route(self, x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copy each row for its experts, sorted by expert.

        Args:
            x: [n, hidden].
            ids: [n, top_k], int32.
            num_experts: at most 10240.

        Returns:
            Rows [n * top_k, hidden], place of each copy [n * top_k] int32, rows of each expert
            [num_experts] int64.
        """
        op = "npu_moe_init_routing_v2"
        require(x.dim() == 2 and x.dtype in _FLOATS, op, f"x is {_of(x)}")
        fits = ids.dim() == 2 and ids.shape[0] == x.shape[0] and ids.dtype == torch.int32
        require(fits, op, f"expert_idx is {_of(ids)} for x {_of(x)}; int32, one row a row")
        require(0 < num_experts <= 10240, op, f"expert_num is {num_experts}")
        rows, places, counts, _ = _npu().npu_moe_init_routing_v2(
            x.contiguous(), ids.contiguous(), active_num=ids.numel(), expert_num=num_experts,
            drop_pad_mode=0, expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=-1,
            active_expert_range=[0, num_experts], row_idx_type=0,
        )  # fmt: skip
        return rows, places, counts

    def grouped_matmul(
        self, x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Rows of each expert times its matrix.

        Args:
            x: [rows, k], sorted by expert.
            weight: [experts, k, n], dtype of ``x``.
            counts: [experts], int64: rows of each.
            bias: [experts, n], float32, or None.
        """
        op = "npu_grouped_matmul"
        _check_groups(op, x, weight, counts)
        require(x.dtype == weight.dtype, op, f"x is {_of(x)}, weight is {_of(weight)}")
        wide = bias is None or (
            bias.dtype == torch.float32 and bias.shape == (weight.shape[0], weight.shape[2])
        )
        require(wide, op, f"bias is {bias is not None and _of(bias)}; float32 [experts, n]")
        out: Tensor = _npu().npu_grouped_matmul(
            [x.contiguous()], [weight], bias=None if bias is None else [bias], group_list=counts,
            split_item=2, group_type=0, group_list_type=1,
        )[0]  # fmt: skip
        return out

    def grouped_matmul_mx(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        counts: Tensor,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """``grouped_matmul`` of blocks that share a power of two.

        Args:
            x: [rows, k], float8_e4m3fn.
            x_scale: [rows, k / 64, 2], uint8.
            weight: [experts, k, n] float8_e4m3fn, or uint8 with two numbers of four bits along k.
            weight_scale: [experts, k / 64, n, 2], uint8.
            counts: [experts], int64.
            dtype: of the result.
        """
        op = "npu_grouped_matmul"
        four_bits = weight.dtype == torch.uint8
        _check_groups(op, x, weight, counts, packed=2 if four_bits else 1)
        fp8 = torch.float8_e4m3fn
        require(x.dtype == fp8, op, f"x is {_of(x)}, not float8_e4m3fn")
        require(weight.dtype in (fp8, torch.uint8), op, f"weight is {_of(weight)}")
        experts, _, n = weight.shape
        _check_scale(op, "per_token_scale", x_scale, (x.shape[0], _blocks(op, x.shape[1]), 2))
        _check_scale(op, "scale", weight_scale, (experts, _blocks(op, x.shape[1]), n, 2))
        out: Tensor = _npu().npu_grouped_matmul(
            [x], [weight], scale=[weight_scale], per_token_scale=[x_scale], group_list=counts,
            split_item=2, group_type=0, group_list_type=1, output_dtype=_enum(op, dtype),
            weight_dtype=FP4_E2M1 if four_bits else None, scale_dtype=E8M0,
            per_token_scale_dtype=E8M0,
        )[0]  # fmt: skip
        return out

    def combine(self, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of what experts made of each row.

        Args:
            rows: [n * top_k, hidden], bfloat16.
            places: [n * top_k], int32, as ``route`` gave them.
            weights: [n, top_k], bfloat16.
        """
        op = "npu_moe_token_unpermute"
        require(rows.dim() == 2 and rows.dtype in self._combined, op, f"tokens are {_of(rows)}")
        count = rows.shape[0]
        require(places.shape == (count,), op, f"sorted_indices is {_of(places)} for {count} rows")
        fits = weights.dim() == 2 and weights.numel() == count and weights.dtype == rows.dtype
        require(fits, op, f"probs is {_of(weights)} for tokens {_of(rows)}")
        out: Tensor = _npu().npu_moe_token_unpermute(rows, places, probs=weights)
        return out

    @property
    def _combined(self) -> tuple[torch.dtype, ...]:
        return tuple(dtype for dtype in self._attention_dtypes if dtype != torch.float16)

    # ------------------------------------------------------------------------------ quantisation

    def quantize_mx(self, x: Tensor, *, four_bits: bool = False) -> tuple[Tensor, Tensor]:
        """Blocks of 32 along the last dimension that share a power of two.

        Args:
            x: [..., k], k a multiple of 64.
            four_bits: E2M1 instead of E4M3.

        Returns:
            Numbers, [..., k] float8_e4m3fn or [..., k / 2] uint8, and scales [..., k / 64, 2]
            uint8.
        """
        op = "npu_dynamic_mx_quant"
        require(x.dtype in _FLOATS, op, f"input is {_of(x)}")
        _blocks(op, x.shape[-1])
        data, scale = _npu().npu_dynamic_mx_quant(
            x, axis=-1, round_mode="rint", dst_type=FP4_E2M1 if four_bits else FP8_E4M3,
            block_size=MX_BLOCK,
        )  # fmt: skip
        return data, scale

    def matmul_mx(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """Product of two matrices of E4M3 blocks.

        Args:
            x: [m, k], float8_e4m3fn.
            x_scale: [m, k / 64, 2], uint8.
            weight: [n, k], float8_e4m3fn.
            weight_scale: [n, k / 64, 2], uint8.
            dtype: of the result.
        """
        op = "npu_quant_matmul"
        for name, side in (("x1", x), ("x2", weight)):
            fits = side.dim() == 2 and side.dtype == torch.float8_e4m3fn
            require(fits, op, f"{name} is {_of(side)}, not float8_e4m3fn")
        k = x.shape[1]
        require(weight.shape[1] == k, op, f"x1 is {_of(x)}, x2 is {_of(weight)} transposed")
        _check_scale(op, "pertoken_scale", x_scale, (x.shape[0], _blocks(op, k), 2))
        _check_scale(op, "scale", weight_scale, (weight.shape[0], _blocks(op, k), 2))
        out: Tensor = _npu().npu_quant_matmul(
            x, weight.t(), weight_scale.transpose(0, 1), pertoken_scale=x_scale,
            output_dtype=_enum(op, dtype), scale_dtype=E8M0, pertoken_scale_dtype=E8M0,
            group_sizes=[1, 1, MX_BLOCK],
        )  # fmt: skip
        return out

    def quantize_int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows divided by scales of their own.

        Args:
            x: [n, k], bfloat16 or float16.

        Returns:
            Numbers [n, k] int8, and scales [n] float32.
        """
        op = "npu_dynamic_quant"
        fits = x.dim() == 2 and x.dtype in self._attention_dtypes
        require(fits, op, f"input is {_of(x)}: rows of 16 bits")
        data, scale = _npu().npu_dynamic_quant(x.contiguous())
        return data, scale

    def matmul_int8(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """Product of two matrices in INT8.

        Args:
            x: [m, k], int8.
            x_scale: [m], float32.
            weight: [n, k], int8.
            weight_scale: [n], float32.
            dtype: of the result.
        """
        op = "npu_quant_matmul"
        for name, side in (("x1", x), ("x2", weight)):
            require(side.dim() == 2 and side.dtype == torch.int8, op, f"{name} is {_of(side)}")
        same = weight.shape[1] == x.shape[1] <= INT8_COLUMNS
        require(same, op, f"x1 is {_of(x)}, x2 is {_of(weight)} transposed")
        for name, scale, side in (
            ("pertoken_scale", x_scale, x), ("scale", weight_scale, weight),
        ):  # fmt: skip
            fits = scale.shape == side.shape[:1] and scale.dtype == torch.float32
            require(fits, op, f"{name} is {_of(scale)} for {_of(side)}; float32, one a row")
        out: Tensor = _npu().npu_quant_matmul(
            x, weight.t(), weight_scale, pertoken_scale=x_scale, output_dtype=_enum(op, dtype)
        )
        return out

    def grouped_matmul_int8(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        counts: Tensor,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """``grouped_matmul`` of numbers in INT8.

        Args:
            x: [rows, k], int8.
            x_scale: [rows], float32.
            weight: [experts, k, n], int8.
            weight_scale: [experts, n], bfloat16.
            counts: [experts], int64.
            dtype: of the result.
        """
        op = "npu_grouped_matmul"
        _check_groups(op, x, weight, counts)
        for name, side in (("x", x), ("weight", weight)):
            require(side.dtype == torch.int8, op, f"{name} is {_of(side)}, not int8")
        fits = x_scale.shape == x.shape[:1] and x_scale.dtype == torch.float32
        require(fits, op, f"per_token_scale is {_of(x_scale)}; float32, one a row of x {_of(x)}")
        experts, _, n = weight.shape
        fits = weight_scale.shape == (experts, n) and weight_scale.dtype == torch.bfloat16
        require(fits, op, f"scale is {_of(weight_scale)}; bfloat16 [experts, n]")
        out: Tensor = _npu().npu_grouped_matmul(
            [x], [weight], scale=[weight_scale], per_token_scale=[x_scale], group_list=counts,
            split_item=2, group_type=0, group_list_type=1, output_dtype=_enum(op, dtype),
        )[0]  # fmt: skip
        return out

    # --------------------------------------------------------------------------------- attention

    def write_pages(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Store rows.

        Args:
            k: [n, kv_heads, head_dim].
            v: likewise.
            keys: [num_pages, page_size, kv_heads, head_dim].
            values: likewise.
            slots: [n], int32 or int64, each at least 0, none twice.
        """
        op = "npu_scatter_pa_kv_cache"
        for name, new, cache in (("key", k, keys), ("value", v, values)):
            paged = cache.dim() == 4 and cache.is_contiguous()
            require(paged, op, f"{name}_cache is {_of(cache)}; {_PAGED}")
            fits = new.dim() == 3 and new.shape[1:] == cache.shape[2:] and new.dtype == cache.dtype
            require(fits, op, f"{name} is {_of(new)} for a cache {_of(cache)}")
        whole = slots.dtype in (torch.int32, torch.int64)
        require(whole and slots.shape == k.shape[:1], op, f"slot_mapping is {_of(slots)}")
        _npu().npu_scatter_pa_kv_cache(
            k.contiguous(), v.contiguous(), keys, values, slots, cache_mode="Norm"
        )

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        table: Tensor,
        lengths: Sequence[int],
        ends: Sequence[int] | None = None,
        mask: Tensor | None = None,
        kind: int = NO_MASK,
    ) -> Tensor:
        """Attention over pages.

        Args:
            q: [num_tokens, heads, head_dim] with ``ends``, else [batch, rows, heads, head_dim].
            keys: [num_pages, page_size, kv_heads, head_dim].
            values: likewise.
            scale: factor on scores.
            table: [batch, width], int32: pages of each sequence.
            lengths: keys of each sequence.
            ends: where the rows of each sequence end in ``q``.
            mask: True where hidden: a triangle for CAUSAL, else [batch, 1, rows, width * size].
            kind: NO_MASK or CAUSAL.

        Returns:
            As ``q``.
        """
        op = "npu_fused_infer_attention_score_v2"
        self._check_attention(op, q, keys, values)
        batch = len(lengths)
        pages, size, kv_heads, dim = keys.shape
        heads = q.shape[-2]
        fits = table.dim() == 2 and table.shape[0] == batch and table.dtype == torch.int32
        require(fits, op, f"block_table is {_of(table)} for {batch} sequences")
        room = table.shape[1] * size
        reach = all(0 < length <= room for length in lengths)
        require(reach, op, f"actual_seq_kvlen {list(lengths)} is not within 1..{room}")
        if ends is None:
            require(q.dim() == 4 and q.shape[0] == batch, op, f"query is {_of(q)}: not BSND")
        else:
            require(q.dim() == 3 and dim in self.soc.flat_dims, op, f"query is {_of(q)}: not TND")
            rising = all(a <= b for a, b in zip([0, *ends], ends, strict=False))
            whole = rising and len(ends) == batch and ends[-1] == q.shape[0]
            require(whole, op, f"actual_seq_qlen {list(ends)}: running sums up to {q.shape[0]}")
        _check_mask(op, mask, kind, None if ends is not None else (batch, 1, q.shape[1], room))
        width = kv_heads * dim
        out: Tensor = _npu().npu_fused_infer_attention_score_v2(
            q.contiguous(), keys.view(pages, size, width), values.view(pages, size, width),
            atten_mask=mask, actual_seq_qlen=None if ends is None else list(ends),
            actual_seq_kvlen=list(lengths), block_table=table.contiguous(), num_query_heads=heads,
            num_key_value_heads=kv_heads, softmax_scale=scale,
            input_layout="BSND" if ends is None else "TND", sparse_mode=kind, block_size=size,
        )[0]  # fmt: skip
        return out

    def _check_attention(self, op: str, q: Tensor, keys: Tensor, values: Tensor) -> None:
        require(q.dtype in self._attention_dtypes, op, f"query is {_of(q)}")
        for name, cache in (("key", keys), ("value", values)):
            paged = cache.dim() == 4 and cache.is_contiguous() and cache.dtype == q.dtype
            require(paged, op, f"{name} is {_of(cache)}; {_PAGED}")
        require(keys.shape == values.shape, op, f"key is {_of(keys)}, value is {_of(values)}")
        _, size, kv_heads, dim = keys.shape
        heads, soc = q.shape[-2], self.soc
        require(size in soc.page_sizes, op, f"pages of {size} tokens, not {soc.page_sizes}")
        require(q.shape[-1] == dim, op, f"query is {_of(q)}, key is {_of(keys)}")
        require(dim % soc.head_multiple == 0, op, f"head_dim {dim}: not of {soc.head_multiple}")
        require(heads % kv_heads == 0, op, f"{heads} query heads do not share {kv_heads} evenly")
        shared = heads // kv_heads <= soc.max_heads_per_kv and heads <= soc.max_heads
        require(shared, op, f"{heads} query heads for {kv_heads}: too many")


GELU_COLUMNS = 1024
"""Most columns of ``gelu_mul``."""

INT8_COLUMNS = 65535
"""Most inputs of a product in INT8."""


def _npu() -> Any:
    return torch.ops.npu


def _of(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _enum(op: str, dtype: torch.dtype) -> int:
    require(dtype in _ENUM, op, f"output_dtype {dtype}: bfloat16 or float16")
    return _ENUM[dtype]


def _blocks(op: str, k: int) -> int:
    require(k % (2 * MX_BLOCK) == 0, op, f"k = {k} is no multiple of {2 * MX_BLOCK}")
    return k // (2 * MX_BLOCK)


def _check_norm(op: str, x: Tensor, gamma: Tensor) -> None:
    require(x.dtype in _FLOATS and x.dim() > 1, op, f"x is {_of(x)}")
    fits = gamma.shape == x.shape[-1:] and gamma.dtype == x.dtype
    require(fits, op, f"gamma is {_of(gamma)} for x {_of(x)}")


def _check_halves(op: str, x: Tensor) -> None:
    fits = x.dtype in _FLOATS and x.dim() > 1 and x.shape[-1] % 2 == 0
    require(fits, op, f"input is {_of(x)}: two halves of a float dtype")


def _check_scale(op: str, name: str, scale: Tensor, shape: tuple[int, ...]) -> None:
    fits = scale.dtype == torch.uint8 and tuple(scale.shape) == shape
    require(fits, op, f"{name} is {_of(scale)}, expected uint8 {list(shape)}")


def _check_groups(op: str, x: Tensor, weight: Tensor, counts: Tensor, packed: int = 1) -> None:
    require(x.dim() == 2 and weight.dim() == 3, op, f"x is {_of(x)}, weight is {_of(weight)}")
    experts, k, _ = weight.shape
    require(k * packed == x.shape[1], op, f"x is {_of(x)}, weight is {_of(weight)}: k differs")
    require(experts > 1, op, "one expert: group_list takes at least two")
    fits = counts.shape == (experts,) and counts.dtype == torch.int64
    require(fits, op, f"group_list is {_of(counts)} for {experts} experts; int64 counts")


def _check_mask(op: str, mask: Tensor | None, kind: int, full: tuple[int, ...] | None) -> None:
    require(kind in (NO_MASK, CAUSAL), op, f"sparse_mode {kind}: {NO_MASK} or {CAUSAL}")
    if kind == CAUSAL:
        fits = mask is not None and mask.shape == (MASK_SIZE, MASK_SIZE)
        what = "none" if mask is None else _of(mask)
        require(fits, op, f"atten_mask is {what}; sparse_mode {CAUSAL} takes {MASK_SIZE} squared")
    if mask is None:
        return
    kinds = (torch.bool, torch.int8, torch.uint8)
    require(mask.dtype in kinds and mask.is_contiguous(), op, f"atten_mask is {_of(mask)}")
    if kind == NO_MASK:
        require(full is not None, op, "layout TND with sparse_mode 0 takes no atten_mask")
        require(tuple(mask.shape) == full, op, f"atten_mask is {_of(mask)}, expected {full}")
