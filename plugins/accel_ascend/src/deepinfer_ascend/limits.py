"""What fused attention can serve, judged from a composition; nothing here needs torch."""

from __future__ import annotations

from deepinfer_ascend.soc import ASCEND_950, Soc
from deepinfer_core import Facts
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind

_INSTEAD = "or set attention.use to 'ascend-torch' (slow)"


def attention_objection(
    facts: Facts, soc: Soc = ASCEND_950, device_type: str = "npu"
) -> str | None:
    """Why fused attention cannot serve a composition, or None."""
    if facts.device_type != device_type:
        return f"runs on {device_type}, not {facts.device_type}"
    if facts.dtype and facts.dtype not in soc.attention_dtypes:
        wanted = " or ".join(soc.attention_dtypes)
        return f"computes in {wanted}, not {facts.dtype}; set dtype to 'bfloat16', {_INSTEAD}"
    if not facts.groups and facts.page_size not in soc.page_sizes:
        return _page_objection(facts.page_size, soc)
    for group in facts.groups:
        reason = group_objection(group, soc)
        if reason is not None:
            return reason
    return None


def _page_objection(size: int, soc: Soc) -> str:
    sizes = ", ".join(map(str, soc.page_sizes))
    return f"pages hold {sizes} tokens, not {size}; set engine.page_size to {soc.page_sizes[0]}"


def group_objection(group: CacheGroupSpec, soc: Soc) -> str | None:
    """Why a cache group cannot be served, or None."""
    name = f"group {group.name!r}"
    if group.kind not in (GroupKind.FULL, GroupKind.WINDOW):
        return f"{name} holds {group.kind} state, not keys and values"
    if group.page_size not in soc.page_sizes:
        return _page_objection(group.page_size, soc)
    if group.value_dim != group.key_dim:
        return (
            f"{name} has keys of {group.key_dim} numbers and values of {group.value_dim}; fused "
            f"attention needs the same, {_INSTEAD}"
        )
    if group.key_dim % soc.head_multiple:
        return (
            f"{name} has heads of {group.key_dim}, no multiple of {soc.head_multiple}; {_INSTEAD}"
        )
    if group.num_kv_heads * group.key_dim > soc.max_page_row:
        return f"{name} has {group.num_kv_heads} heads of {group.key_dim}, too much for one row"
    if group.dtype not in soc.attention_dtypes:
        return (
            f"{name} stores {group.dtype}; possible: {', '.join(soc.attention_dtypes)}; set "
            "engine.kv_dtype to 'auto'"
        )
    return None
