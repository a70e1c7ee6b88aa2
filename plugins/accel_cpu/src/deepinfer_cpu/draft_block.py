"""Op "draft_block": both halves of a draft pass, each in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.interfaces.kernels import (
    DraftBlockWeights,
    DraftChainWeights,
    DraftLayerWeights,
    DraftPast,
)
from deepinfer_cpu import structs
from deepinfer_cpu.ops import rows_of
from deepinfer_cpu.weights import GROUP

KINDS = ("vanilla", "gated", "rnn")
"""Kinds of Markov heads in the order of ``di::DraftChain::Kind``."""


class DraftBlockHandle:
    """A draft model's native structs and everything they point to."""

    def __init__(self, weights: DraftBlockWeights) -> None:
        self.weights = weights
        self._kept: list[Any] = []
        count = len(weights.layers)
        self._layers = (structs.DecoderLayer * count)(*map(self._layer, weights.layers))
        self._pairs = (ctypes.c_void_p * count)(
            *(ctypes.addressof(layer.keys_values.struct) for layer in weights.layers)
        )
        self.mask = self._floats(weights.mask)
        self.struct = structs.DraftBlock(
            decoder=structs.Decoder(
                layers=ctypes.addressof(self._layers),
                final_norm=self._floats(weights.final_norm),
                cos=self._floats(weights.cos),
                sin=self._floats(weights.sin),
                num_layers=count,
                hidden=weights.hidden_size,
                num_heads=weights.num_heads,
                num_kv_heads=weights.num_kv_heads,
                head_dim=weights.head_dim,
                intermediate=weights.intermediate_size,
                half=weights.cos.shape[1],
                eps=weights.norm_eps,
            ),
            context=ctypes.addressof(weights.context.struct),
            context_norm=self._floats(weights.context_norm),
            keys_values=ctypes.addressof(self._pairs),
            head=ctypes.addressof(weights.head.struct),
        )
        self.reference = ctypes.byref(self.struct)

    def _layer(self, layer: DraftLayerWeights) -> structs.DecoderLayer:
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
            use_rope=True,
        )

    def _floats(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


class DraftChainHandle:
    """Sequential heads as the library takes them."""

    def __init__(self, weights: DraftChainWeights) -> None:
        self._kept = [
            None if part is None else part.detach().float().contiguous()
            for part in (weights.table, weights.inner, weights.sure)
        ]
        self.weights, self._ids = weights, weights.ids.contiguous()
        table, inner, sure = (None if part is None else part.data_ptr() for part in self._kept)
        self.struct = structs.DraftChain(
            table=table,
            inner=inner,
            sure=sure,
            bias=ctypes.addressof(weights.bias.struct),
            ids=self._ids.data_ptr(),
            rank=weights.table.shape[1],
            kind=KINDS.index(weights.kind),
            says=weights.says,
        )
        self.reference = ctypes.byref(self.struct)


class NativeDraftBlock:
    """The op.

    Args:
        library: the native library.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def prepare(self, weights: DraftBlockWeights) -> DraftBlockHandle | None:
        """See ``DraftBlock``; feed-forwards must consist of whole groups of 32."""
        return DraftBlockHandle(weights) if weights.intermediate_size % GROUP == 0 else None

    def context(
        self, features: Tensor, positions: Tensor, handle: DraftBlockHandle
    ) -> list[tuple[Tensor, Tensor]]:
        """See ``DraftBlock``."""
        weights, rows = handle.weights, features.shape[0]
        wide, at = features.float().contiguous(), positions.to(torch.int32)
        shape = len(weights.layers), 2, rows, weights.num_kv_heads, weights.head_dim
        found = torch.empty(shape)
        pointers = [part.data_ptr() for part in found.flatten(0, 1)]
        keys = (ctypes.c_void_p * len(weights.layers))(*pointers[::2])
        values = (ctypes.c_void_p * len(weights.layers))(*pointers[1::2])
        native = structs.DraftContext(
            features=wide.data_ptr(),
            positions=at.data_ptr(),
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            rows=rows,
        )
        self._library.di_draft_context(handle.reference, ctypes.byref(native))
        return [(pair[0], pair[1]) for pair in found]

    def run(
        self,
        anchors: Tensor,
        positions: Sequence[int],
        block_size: int,
        pasts: Sequence[Sequence[DraftPast]],
        wanted: int,
        handle: DraftBlockHandle,
    ) -> Tensor:
        """See ``DraftBlock``."""
        count, limit = len(positions), handle.weights.cos.shape[0] - 1
        at = np.add.outer(np.array(positions), np.arange(block_size)).clip(max=limit)
        at = np.ascontiguousarray(at, np.int32)
        unseen = np.array([past.unseen for layer in pasts for past in layer], np.int32)
        seen = (structs.DraftPast * (len(pasts) * count))(
            *(
                structs.DraftPast(past.keys.data_ptr(), past.values.data_ptr(), len(past.keys))
                for layer in pasts
                for past in layer
            )
        )
        rows = rows_of(anchors).contiguous()
        out = torch.empty(count, wanted, handle.weights.head.n)
        native = structs.DraftStep(
            anchors=rows.data_ptr(),
            mask=handle.mask,
            positions=at.ctypes.data,
            past=ctypes.addressof(seen),
            unseen=unseen.ctypes.data,
            out=out.data_ptr(),
            num_sequences=count,
            block=block_size,
            wanted=wanted,
        )
        self._library.di_draft_block(handle.reference, ctypes.byref(native))
        return out

    def prepare_chain(self, weights: DraftChainWeights) -> DraftChainHandle:
        """See ``DraftBlock``."""
        return DraftChainHandle(weights)

    def chain(
        self, rows: Tensor, anchors: Tensor, handle: DraftChainHandle
    ) -> tuple[Tensor, Tensor]:
        """See ``DraftBlock``."""
        count, wanted, stride = rows.shape
        wide, first = rows.float().contiguous(), anchors.contiguous()
        if first.numel() and not 0 <= int(first.min()) <= int(first.max()) < len(
            handle.weights.table
        ):
            raise IndexError(f"anchors must lie within 0 and {len(handle.weights.table) - 1}")
        tokens = torch.empty(count, wanted, dtype=torch.int64)
        confidence = torch.empty(count, wanted)
        native = structs.DraftChainStep(
            rows=wide.data_ptr(),
            anchors=first.data_ptr(),
            tokens=tokens.data_ptr(),
            confidence=confidence.data_ptr(),
            num_sequences=count,
            wanted=wanted,
            stride=stride,
        )
        self._library.di_draft_chain(handle.reference, ctypes.byref(native))
        return tokens, confidence
