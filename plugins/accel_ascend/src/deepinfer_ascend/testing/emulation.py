"""What the documentation says that ops of the device compute, on CPU tensors.

Written from the documentation of torch_npu, not from any implementation. With torch_npu installed
these serve its own signatures; without, ``install`` registers the same signatures first. They show
that calls are wired as documented, and nothing about what a device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_ascend.testing.schemas import SCHEMAS

_OPS: dict[str, Callable[..., Any]] = {}
_INSTALLED: list[torch.library.Library] = []


def install() -> None:
    """Serve the ops on CPU tensors in this process; further calls change nothing."""
    if _INSTALLED:
        return
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    if "npu::npu_rms_norm" not in known:
        fragment = torch.library.Library("npu", "FRAGMENT")
        for schema in SCHEMAS:
            fragment.define(schema)
        _INSTALLED.append(fragment)
    library = torch.library.Library("npu", "IMPL", "CPU")
    for name, function in _OPS.items():
        library.impl(name, function)
    _INSTALLED.append(library)


def _op(function: Callable[..., Any]) -> Callable[..., Any]:
    _OPS[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------- single rows


@_op
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(x / rms * gamma, 1 / rms)."""
    wide = input.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * gamma.float()).to(input.dtype), inverse


@_op
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(norm of the sum, 1 / rms, the sum)."""
    total = x1 + x2
    normed, inverse = npu_rms_norm(total, gamma, epsilon)
    return normed, inverse, total


@_op
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """``r1 * input + r2 * turned``."""
    _needs(rotate is None, "rotate")
    _needs(input.dim() == r1.dim() == r2.dim() == 4, "four dimensions")
    wide = input.float()
    if rotary_mode == "half":
        first, second = wide.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        _needs(rotary_mode == "interleave", rotary_mode)
        turned = torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).flatten(-2)
    return (r1.float() * wide + r2.float() * turned).to(input.dtype)


@_op
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """``silu(a) * b`` of two halves."""
    first, second = input.float().chunk(2, dim)
    return (first * torch.sigmoid(first) * second).to(input.dtype)


@_op
def npu_clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """``a * sigmoid(alpha * a) * (b + bias)`` of halves that are cut off first."""
    _needs(group_index is None and dim == -1, "group_index and dim")
    wide = x.float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    first, second = first.clamp(max=limit), second.clamp(-limit, limit)
    return (first * torch.sigmoid(alpha * first) * (second + bias)).to(x.dtype)


@_op
def npu_gelu_mul(input: Tensor, *, approximate: str = "none") -> Tensor:
    """``gelu(a) * b`` of two halves."""
    first, second = input.float().chunk(2, -1)
    return (functional.gelu(first, approximate=approximate) * second).to(input.dtype)


# ----------------------------------------------------------------------------------------- experts


@_op
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax, then the k largest; of equals the first."""
    _needs(finished is None, "finished")
    chances = torch.softmax(x.float(), -1)
    found, ids = torch.sort(chances, dim=-1, descending=True, stable=True)
    rows = torch.arange(x.shape[0] * k).view(k, -1).t()
    return found[:, :k].to(x.dtype), ids[:, :k].int(), rows.int().contiguous()


@_op
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copies sorted by expert, where each copy went, rows of each expert."""
    _needs(scale is None and offset is None and quant_mode == -1, "quantisation")
    _needs(expert_tokens_num_type == 1 and expert_tokens_num_flag, "counts")
    _needs(list(active_expert_range) == [0, expert_num], "active_expert_range")
    _needs(drop_pad_mode == 0 and row_idx_type == 0, "dropless, gather")
    flat = expert_idx.flatten().long()
    order = torch.argsort(flat, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = torch.bincount(flat, minlength=expert_num)
    return x[order // expert_idx.shape[1]], places.int(), counts, torch.zeros(len(flat))


@_op
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Weighted sum of the copies of each row."""
    assert probs is not None
    _needs(not padded_mode and restore_shape is None, "padded_mode")
    taken = permuted_tokens[sorted_indices.long()].unflatten(0, probs.shape).float()
    return (taken * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)


@_op
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    offset: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: Any = None,
    activation_quant_scale: Any = None,
    activation_quant_offset: Any = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Any = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """Rows of each group times the group's matrix."""
    assert group_list is not None
    _needs(split_item in (2, 3) and group_type == 0 and act_type == 0, "one result")
    numbers = (
        group_list if group_list_type == 1 else group_list.diff(prepend=group_list.new_zeros(1))
    )
    rows, matrices = x[0], weight[0]
    if scale is not None and rows.dtype == torch.int8:
        assert per_token_scale is not None
        _needs(scale_dtype is None and per_token_scale_dtype is None, "plain scales")
        _needs(matrices.dtype == torch.int8 and scale[0].dtype == torch.bfloat16, "int8")
        # Sums of products of INT8 are whole numbers; scales come afterwards.
        rows = rows.double() * per_token_scale[0].double().unsqueeze(-1)
        matrices = matrices.double() * scale[0].double().unsqueeze(1)
    elif scale is not None:
        assert per_token_scale is not None
        _needs(scale_dtype == per_token_scale_dtype == 293, "scales that are powers of two")
        rows = unblocked(rows, per_token_scale[0])
        # Blocks lie along inputs, which come second to last.
        turned = matrices.transpose(1, 2)
        if weight_dtype == 296:
            turned = four_bit_numbers(turned)
        matrices = unblocked(turned, scale[0].transpose(1, 2)).transpose(1, 2)
    out = []
    if rows.dtype != torch.float64:
        rows = rows.float()
    for expert, part in enumerate(rows.split(numbers.tolist())):
        y = part @ matrices[expert].to(rows.dtype)
        out.append(y if bias is None else y + bias[0][expert].float())
    dtype = x[0].dtype if output_dtype is None else _dtype_of(output_dtype)
    return [torch.cat(out).to(dtype)]


# ------------------------------------------------------------------------------------ quantisation

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@_op
def npu_dynamic_mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Blocks divided by the power of two of their largest number, as OCP MX 1.0 has it."""
    _needs(axis == -1 and round_mode == "rint" and block_size == 32 and scale_alg == 0, "plain OCP")
    largest_power = {292: 8, 296: 2}[dst_type]
    blocks = input.float().unflatten(-1, (-1, block_size))
    most = blocks.abs().amax(-1)
    exponent = torch.where(most > 0, torch.floor(torch.log2(most)) - largest_power, -127.0)
    exponent = exponent.clamp(-127, 127)
    scaled = (blocks * torch.exp2(-exponent).unsqueeze(-1)).flatten(-2)
    scale = (exponent + 127).to(torch.uint8).unflatten(-1, (-1, 2))
    if dst_type == 292:
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), scale
    codes = (scaled.abs().clamp(max=6).unsqueeze(-1) - _E2M1).abs().argmin(-1)
    codes = codes.to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    return codes[..., ::2] | codes[..., 1::2] << 4, scale


@_op
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Rows divided by a 127th of their largest number, rounded to whole ones."""
    _needs(smooth_scales is None and group_index is None and dst_type is None, "plain int8")
    _needs(quant_mode == "pertoken", quant_mode)
    wide = input.float()
    scale = wide.abs().amax(-1) / 127
    numbers = torch.where(scale.unsqueeze(-1) > 0, wide / scale.unsqueeze(-1), 0)
    return numbers.round().clamp(-128, 127).to(torch.int8), scale


def four_bit_numbers(packed: Tensor) -> Tensor:
    """[..., k / 2] uint8 -> [..., k], the lower half of a byte first."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
    return torch.where(codes > 7, -_E2M1[codes & 7], _E2M1[codes & 7])


def unblocked(data: Tensor, scale: Tensor) -> Tensor:
    """[..., k] numbers times [..., k / 64, 2] powers of two."""
    powers = torch.exp2(scale.flatten(-2).float() - 127).repeat_interleave(32, -1)
    return data.float() * powers


@_op
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """Product of two matrices in blocks."""
    assert pertoken_scale is not None
    assert output_dtype is not None
    if x1.dtype == torch.int8:
        _needs(x2.dtype == torch.int8 and bias is None and group_sizes is None, "plain int8")
        _needs(scale_dtype is None and pertoken_scale_dtype is None, "plain scales")
        sums = x1.double() @ x2.double()
        scaled = sums * pertoken_scale.double().unsqueeze(-1) * scale.double()
        return scaled.to(_dtype_of(output_dtype))
    _needs(scale_dtype == pertoken_scale_dtype == 293, "scales that are powers of two")
    _needs(list(group_sizes or ()) == [1, 1, 32], "group_sizes")
    left = unblocked(x1, pertoken_scale)
    right = unblocked(x2.t(), scale.transpose(0, 1))
    return (left @ right.t()).to(_dtype_of(output_dtype))


def _dtype_of(number: int) -> torch.dtype:
    return {15: torch.bfloat16, 5: torch.float16, 6: torch.float32}[number]


# --------------------------------------------------------------------------------------- attention


@_op
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Rows into their slots."""
    _needs(cache_mode in (None, "Norm"), "cache_mode Norm")
    slots = slot_mapping.long()
    room = key_cache.shape[0] * key_cache.shape[1]
    _needs(bool(((slots >= 0) & (slots < room)).all()), f"slots within 0..{room - 1}")
    _needs(len(slots.unique()) == len(slots), "slots that differ")
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = rows


@_op
def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Softmax attention over pages, sequence by sequence."""
    tables = options["block_table"]
    size, scale = options["block_size"], options["softmax_scale"]
    heads, kv_heads = options["num_query_heads"], options["num_key_value_heads"]
    lengths: Any = options["actual_seq_kvlen"]
    ends: Any = options.get("actual_seq_qlen")
    kind, mask = options.get("sparse_mode", 0), options.get("atten_mask")
    out = torch.empty_like(query)
    start = 0
    for index, length in enumerate(lengths):
        if options["input_layout"] == "TND":
            rows = query[start : ends[index]]
            target = out[start : ends[index]]
            start = ends[index]
        else:
            _needs(options["input_layout"] == "BSND", options["input_layout"])
            rows, target = query[index], out[index]
        if not len(rows):
            continue
        pages = tables[index, : -(-length // size)].long()
        seen = [
            side[pages].flatten(0, 1)[:length].unflatten(-1, (kv_heads, -1)).double()
            for side in (key, value)
        ]
        keys, values = (side.repeat_interleave(heads // kv_heads, 1) for side in seen)
        scores = torch.einsum("thd,shd->hts", rows.double(), keys) * scale
        hidden = _hidden(kind, mask, index, len(rows), length)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        target.copy_(torch.einsum("hts,shd->thd", scores.softmax(-1), values))
    return out, torch.zeros(1)


def _hidden(kind: int, mask: Tensor | None, index: int, rows: int, keys: int) -> Tensor | None:
    """[rows, keys]; kinds of masks do not count for single rows, a whole mask does."""
    if kind == 0:
        return None if mask is None else mask[index, 0, :rows, :keys].bool()
    _needs(kind == 3 and mask is not None, "sparse_mode 3 with its mask")
    assert mask is not None
    _needs(torch.equal(mask.bool(), torch.ones(2048, 2048).triu(1).bool()), "a triangle")
    if rows == 1:
        return None
    return torch.ones(rows, keys).triu(keys - rows + 1).bool()


def _needs(condition: bool, what: str) -> None:
    if not condition:
        raise NotImplementedError(f"the emulation knows only: {what}")
