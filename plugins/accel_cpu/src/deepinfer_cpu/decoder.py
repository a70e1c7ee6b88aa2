"""Op "decoder_layers": a whole forward pass in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.interfaces.kernels import DecoderWeights
from deepinfer_core.interfaces.model import StepContext
from deepinfer_cpu import structs
from deepinfer_cpu.attention import layer_struct
from deepinfer_cpu.kv_storage import KvStorage
from deepinfer_cpu.weights import GROUP


class DecoderHandle:
    """A decoder's native structs and everything they point to."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.weights = weights
        self._kept: list[Any] = []
        self._storages: tuple[KvStorage, ...] = ()
        cos = self._floats(weights.cos)
        self.layers = (structs.DecoderLayer * len(weights.layers))(
            *map(self._layer, weights.layers)
        )
        for layer, group in zip(self.layers, weights.groups, strict=True):
            layer.group = group
        self.struct = structs.Decoder(
            layers=ctypes.addressof(self.layers),
            embedding=ctypes.addressof(weights.embedding.struct),
            final_norm=self._floats(weights.final_norm),
            cos=cos,
            sin=self._floats(weights.sin),
            num_layers=len(weights.layers),
            hidden=weights.hidden_size,
            num_heads=weights.num_heads,
            num_kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            intermediate=weights.intermediate_size,
            half=weights.cos.shape[1],
            eps=weights.norm_eps,
        )
        names = ["embedding", *(f"layer.{i}" for i in range(len(weights.layers)))]
        self.taps = {name: index for index, name in enumerate(names)}

    def bind(self, storages: Sequence[KvStorage]) -> None:
        """Point the layers to the memory of their cache groups."""
        if len(storages) == len(self._storages) and all(
            mine is other for mine, other in zip(self._storages, storages, strict=True)
        ):
            return
        self._storages, weights = tuple(storages), self.weights
        self._attention = [
            layer_struct(index, storages[group], layer.params, weights.num_heads)
            for index, (layer, group) in enumerate(zip(weights.layers, weights.groups, strict=True))
        ]
        for layer, (struct, _) in zip(self.layers, self._attention, strict=True):
            layer.attention = ctypes.addressof(struct)

    def _layer(self, layer: Any) -> structs.DecoderLayer:
        norms = layer.head_norms or (None, None)
        return structs.DecoderLayer(
            input_norm=self._floats(layer.input_norm),
            middle_norm=self._floats(layer.middle_norm),
            q_norm=self._floats(norms[0]),
            k_norm=self._floats(norms[1]),
            qkv=ctypes.addressof(layer.qkv.struct),
            output=ctypes.addressof(layer.output.struct),
            gate_up=ctypes.addressof(layer.gate_up.struct),
            down=ctypes.addressof(layer.down.struct),
            use_rope=layer.use_rope,
        )

    def _floats(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


class NativeDecoderLayers:
    """The op.

    Args:
        library: the native library.
        dtype: of taps. Hidden states stay in float32, as they are inside: the head reads them as
            they are, and logits lose nothing.
    """

    def __init__(self, library: Any, dtype: torch.dtype) -> None:
        self._library, self._dtype = library, dtype

    def prepare(self, weights: DecoderWeights) -> DecoderHandle | None:
        """See ``DecoderLayers``; feed-forwards must consist of whole groups of 32."""
        return DecoderHandle(weights) if weights.intermediate_size % GROUP == 0 else None

    def run(self, step: StepContext, handle: DecoderHandle) -> Tensor:
        """See ``DecoderLayers``; rows of padding are left out."""
        batch = step.batch
        rows, wanted = batch.num_tokens, np.ascontiguousarray(batch.logit_rows, np.int32)
        positions = np.ascontiguousarray(batch.positions, np.int32)
        hidden = handle.weights.hidden_size
        taps = {name: torch.empty(rows, hidden) for name in batch.taps if name in handle.taps}
        tap_array = (ctypes.c_void_p * len(handle.taps))()
        for name, rows_of_tap in taps.items():
            tap_array[handle.taps[name]] = rows_of_tap.data_ptr()
        out = torch.empty(len(wanted), hidden)
        token_ids, out_pointer = step.token_ids.data_ptr(), out.data_ptr()
        # From here on the interpreter's lock is not given up before the library has it all: readers
        # of the last step's tokens are woken by ``group``, and would take it.
        storages, plans = zip(*map(step.group, range(len(batch.groups))), strict=True)
        handle.bind(storages)
        plan_array = (ctypes.c_void_p * len(plans))(*(ctypes.addressof(p.struct) for p in plans))
        native = structs.Step(
            token_ids=token_ids,
            positions=positions.ctypes.data,
            plans=ctypes.addressof(plan_array),
            wanted=wanted.ctypes.data,
            taps=ctypes.addressof(tap_array),
            out=out_pointer,
            rows=rows,
            num_wanted=len(wanted),
        )
        self._library.di_decoder(ctypes.byref(handle.struct), ctypes.byref(native))
        for name, rows_of_tap in taps.items():
            step.tap(name, rows_of_tap.to(self._dtype))
        return out
