"""The native library's plain structs, field for field as its headers declare them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class AttentionPlan(ctypes.Structure):
    """``di::AttentionPlan`` of ``attention.h``: one cache group in one step."""

    _fields_ = (
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("block_tables", c_void_p),
        ("visible_from", c_void_p),
        ("write_slots", c_void_p),
        ("scratch", c_void_p),
        ("scratch_size", c_int64),
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("max_pages", c_int32),
        ("reserved", c_int32),
    )


class AttentionLayer(ctypes.Structure):
    """``di::AttentionLayer`` of ``attention.h``: memory and constants of one layer."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("kv_type", c_int32),
        ("page_size", c_int32),
        ("num_query_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("reserved", c_int32),
    )
