"""The native library's plain structs, field for field as its headers declare them."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


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


class Format(IntEnum):
    """``di::Format`` of ``linear.h``; in lower case the names of core's packed formats."""

    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2
    BF16 = 3
    F32 = 4


class Linear(ctypes.Structure):
    """``di::Linear`` of ``linear.h``: a weight in panels."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("format", c_int32),
        ("bits", c_int32),
    )


class DrawRow(ctypes.Structure):
    """``di::DrawRow`` of ``draw.cpp``: how one row is drawn."""

    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("top_k", c_int64),
        ("key", c_int64),
    )


class ChannelLinear(ctypes.Structure):
    """``di::ChannelLinear`` of ``gemm_channel.h``: a weight of 8 bits with a scale an output."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
    )


class Experts(ctypes.Structure):
    """``di::Experts`` of ``experts.h``: the feed-forward experts of a layer."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("count", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("alpha", c_float),
        ("limit", c_float),
        ("offset", c_float),
        ("reserved", c_int32),
    )


class DecoderLayer(ctypes.Structure):
    """``di::DecoderLayer`` of ``decoder.h``."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("middle_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("attention", c_void_p),
        ("group", c_int32),
        ("use_rope", c_int32),
    )


class Decoder(ctypes.Structure):
    """``di::Decoder`` of ``decoder.h``: all layers."""

    _fields_ = (
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("intermediate", c_int64),
        ("half", c_int64),
        ("eps", c_float),
        ("reserved", c_int32),
    )


class Step(ctypes.Structure):
    """``di::Step`` of ``decoder.h``: one forward pass."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("plans", c_void_p),
        ("wanted", c_void_p),
        ("taps", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("num_wanted", c_int64),
    )


class DraftBlock(ctypes.Structure):
    """``di::DraftBlock`` of ``draft.h``: the parallel part of a draft model."""

    _fields_ = (
        ("decoder", Decoder),
        ("context", c_void_p),
        ("context_norm", c_void_p),
        ("keys_values", c_void_p),
        ("head", c_void_p),
    )


class DraftPast(ctypes.Structure):
    """``di::DraftPast`` of ``draft.h``: what one sequence sees in one layer."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("count", c_int64))


class DraftStep(ctypes.Structure):
    """``di::DraftStep`` of ``draft.h``: one draft pass."""

    _fields_ = (
        ("anchors", c_void_p),
        ("mask", c_void_p),
        ("positions", c_void_p),
        ("past", c_void_p),
        ("unseen", c_void_p),
        ("out", c_void_p),
        ("num_sequences", c_int64),
        ("block", c_int64),
        ("wanted", c_int64),
    )


class DraftChain(ctypes.Structure):
    """``di::DraftChain`` of ``draft.h``: the sequential part of a draft model."""

    _fields_ = (
        ("table", c_void_p),
        ("inner", c_void_p),
        ("sure", c_void_p),
        ("bias", c_void_p),
        ("ids", c_void_p),
        ("rank", c_int64),
        ("kind", c_int32),
        ("says", c_int32),
    )


class DraftChainStep(ctypes.Structure):
    """``di::DraftChainStep`` of ``draft.h``: the rows of one draft pass, from left to right."""

    _fields_ = (
        ("rows", c_void_p),
        ("anchors", c_void_p),
        ("tokens", c_void_p),
        ("confidence", c_void_p),
        ("num_sequences", c_int64),
        ("wanted", c_int64),
        ("stride", c_int64),
    )


class DraftContext(ctypes.Structure):
    """``di::DraftContext`` of ``draft.h``: context rows and where their keys and values go."""

    _fields_ = (
        ("features", c_void_p),
        ("positions", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("rows", c_int64),
    )
