"""Attention "native": pages, mixed batches and grouped heads in one native call a layer.

A row's bits depend on nothing but its own sequence: every block of positions is computed by the
same operations, and blocks are put together in ascending order (``native/attention.h``).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_core.batch import Batch
from deepinfer_core.capabilities import Facts
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_cpu import library
from deepinfer_cpu.kv_storage import KV_TYPES, KvStorage
from deepinfer_cpu.structs import AttentionLayer, AttentionPlan


def why_not(facts: Facts) -> str | None:
    """Why native attention cannot serve a composition, or None."""
    if facts.device_type != "cpu":
        return f"runs on cpu, not {facts.device_type}"
    if facts.dtype == "float64":
        return "computes in float32, which float64 asks more of"
    for group in facts.groups:
        reason = _group_objection(group)
        if reason is not None:
            return reason
    return None


def _group_objection(group: CacheGroupSpec) -> str | None:
    if group.kind not in (GroupKind.FULL, GroupKind.WINDOW):
        return f"group {group.name!r} holds {group.kind} state, not keys and values"
    if not group.value_dim:
        return f"group {group.name!r} keeps key and value in one vector"
    if group.page_size & (group.page_size - 1):
        return f"group {group.name!r} has pages of {group.page_size} tokens, not a power of two"
    if group.dtype not in KV_TYPES:
        return f"group {group.name!r} stores {group.dtype}; possible: {', '.join(KV_TYPES)}"
    return None


class GroupPlan:
    """``di::AttentionPlan`` and the arrays it points to."""

    def __init__(self, batch: Batch, group_index: int) -> None:
        group = batch.groups[group_index]
        tables = _packed(group.block_tables, np.int32)
        arrays = {
            "positions": _packed(batch.positions, np.int32),
            "query_starts": _packed(batch.query_starts, np.int32),
            "block_tables": tables,
            "visible_from": _packed(group.visible_from, np.int32),
            "write_slots": _packed(group.write_slots, np.int64),
        }
        self._kept: list[Any] = list(arrays.values())
        self.struct = AttentionPlan(
            **{name: array.ctypes.data for name, array in arrays.items()},
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
            max_pages=tables.shape[1],
        )

    def give_scratch(self, floats: int) -> None:
        """Memory with which long sequences are cut among the threads."""
        if floats:
            scratch = np.empty(floats, np.float32)
            self._kept.append(scratch)
            self.struct.scratch, self.struct.scratch_size = scratch.ctypes.data, floats


def _packed(array: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array, dtype=kind)


class NativeAttention:
    """The backend.

    Args:
        context: the groups to serve.
        native: the library; None = the best level for this machine.
    """

    def __init__(self, context: AttentionContext, native: ctypes.CDLL | None = None) -> None:
        self._context = context
        self._native = native or library.load()
        self._native.di_set_threads(ctypes.c_int32(torch.get_num_threads()))
        self._native.di_attention_scratch.restype = ctypes.c_int64
        self._shapes = [
            _constants(
                group, AttentionParams(scale=1.0, window=group.window), context.num_query_heads
            )
            for group in context.groups
        ]
        self._layers: dict[tuple[int, int, AttentionParams], tuple[AttentionLayer, Any]] = {}

    def allocate(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> KvStorage:
        """Memory for a group; content undefined."""
        return KvStorage(group, num_pages, device, self._native)

    def plan(self, batch: Batch, group_index: int, device: torch.device) -> GroupPlan:
        """Addressing for one group, used by all of its layers."""
        plan = GroupPlan(batch, group_index)
        shape = ctypes.byref(self._shapes[group_index])
        plan.give_scratch(self._native.di_attention_scratch(shape, ctypes.byref(plan.struct)))
        return plan

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        layer: int,
        storage: KvStorage,
        plan: GroupPlan,
        params: AttentionParams,
    ) -> Tensor:
        """See ``deepinfer_core.interfaces.attention.Attention``."""
        queries = _rows(q)
        out = torch.empty(q.shape[0], q.shape[1], storage.group.value_dim)
        keys = values = None
        if k is not None and v is not None:
            keys, values = _rows(k), _rows(v)
        self._native.di_attend(
            ctypes.byref(self.layer(layer, storage, params)),
            ctypes.byref(plan.struct),
            *_strided(queries),
            *_strided(keys),
            *_strided(values),
            *_strided(out),
        )
        return out if q.dtype == torch.float32 else out.to(q.dtype)

    def layer(self, layer: int, storage: KvStorage, params: AttentionParams) -> AttentionLayer:
        """Memory and constants of one layer, made once."""
        key = layer, id(storage), params
        if key not in self._layers:
            made, sinks = layer_struct(layer, storage, params, self._context.num_query_heads)
            # The storage is kept, so that no other one gets its id.
            self._layers[key] = made, (storage, sinks)
        return self._layers[key][0]


def layer_struct(
    layer: int, storage: KvStorage, params: AttentionParams, num_query_heads: int
) -> tuple[AttentionLayer, Any]:
    """Memory and constants of one layer, and what must be kept as long as they are used."""
    made = _constants(storage.group, params, num_query_heads)
    for name, address in storage.pointers(layer).items():
        setattr(made, name, address)
    sinks = None
    if params.sinks is not None:
        sinks = params.sinks.detach().to(torch.float32).contiguous()
        made.sinks = sinks.data_ptr()
    return made, sinks


def _constants(
    group: CacheGroupSpec, params: AttentionParams, num_query_heads: int
) -> AttentionLayer:
    return AttentionLayer(
        scale=params.scale,
        softcap=params.softcap,
        window=params.window,
        kv_type=KV_TYPES[group.dtype],
        page_size=group.page_size,
        num_query_heads=num_query_heads,
        num_kv_heads=group.num_kv_heads,
        key_dim=group.key_dim,
        value_dim=group.value_dim,
    )


def _rows(x: Tensor) -> Tensor:
    """[n, heads, dim] as float32, the numbers of a row side by side."""
    x = x.detach().to(torch.float32)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _strided(x: Tensor | None) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    if x is None:
        return ctypes.c_void_p(None), ctypes.c_int64(0)
    return ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.stride(0))


def build(config: Any, context: AttentionContext) -> NativeAttention:
    """Make the backend."""
    return NativeAttention(context)
