"""The frozen target as the trainer needs it: whole texts in, layer outputs and head out.

No engine, pages or scheduler: the core's model, its reference ops, and dense causal attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_core.batch import Batch
from deepinfer_core.checkpoint.gguf import GgufFormat
from deepinfer_core.checkpoint.safetensors import SafetensorsFormat
from deepinfer_core.components import Priority
from deepinfer_core.errors import CheckpointError
from deepinfer_core.interfaces.checkpoint import Checkpoint, CheckpointFormat
from deepinfer_core.interfaces.kernels import OpFacts, OpProvider
from deepinfer_core.interfaces.model import BuildRequest, Model
from deepinfer_core.models.decoder import DecoderFamily
from deepinfer_core.ops import reference
from deepinfer_core.ops.table import OpChoice, OpTable

_FORMATS: tuple[CheckpointFormat, ...] = (SafetensorsFormat(), GgufFormat())


@frozen(kw_only=True, eq=False)
class Target:
    """A target with its checkpoint.

    Attributes:
        checkpoint: open, for the tokenizer, the configuration and single tensors.
        model: the core's model over plain torch ops.
    """

    checkpoint: Checkpoint
    model: Model

    @property
    def num_layers(self) -> int:
        """Layers of the target."""
        return self.model.spec.num_layers

    def head_weight(self) -> Tensor:
        """[vocab_size, hidden_size], float32."""
        names = self.checkpoint.names()
        name = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
        return self.checkpoint.read(name).float()

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size], float32."""
        return self.checkpoint.read("model.embed_tokens.weight").float()

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], taps: Sequence[str]) -> tuple[list[Tensor], Tensor]:
        """Compute one text.

        Returns:
            The taps in order and the final normed output, [num_tokens, hidden_size] each.
        """
        step = _DenseStep(token_ids, taps)
        hidden = self.model.forward(step)
        return [step.taps[name] for name in taps], hidden


class _DenseStep:
    """A ``StepContext`` of one text without pages."""

    def __init__(self, token_ids: Sequence[int], taps: Sequence[str]) -> None:
        count = len(token_ids)
        rows = np.arange(count, dtype=np.int32)
        self.batch = Batch(
            step=0,
            sequence_ids=(0,),
            token_ids=np.asarray(token_ids, np.int32),
            token_sources=np.full(count, -1, np.int32),
            positions=rows,
            query_starts=np.asarray([0, count], np.int32),
            context_lengths=np.asarray([count], np.int32),
            num_drafts=np.zeros(1, np.int32),
            logit_rows=rows,
            logit_sequences=np.zeros(count, np.int32),
            keep_from=np.zeros(1, np.int32),
            groups=(),
            taps=tuple(taps),
        )
        self.token_ids = torch.tensor(list(token_ids), dtype=torch.int64)
        self.positions = torch.arange(count)
        self.logit_rows = torch.arange(count)
        self.scratch: dict[str, Any] = {}
        self.taps: dict[str, Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, params: Any
    ) -> Tensor:
        assert k is not None
        assert v is not None
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        mask = None
        if params.window:
            count = q.shape[2]
            near = torch.ones(count, count, dtype=torch.bool).tril()
            mask = near & ~torch.ones_like(near).tril(-params.window)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=params.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def group(self, index: int) -> tuple[Any, Any]:
        raise NotImplementedError("whole texts are computed without cache groups")

    def tap(self, name: str, hidden: Tensor) -> None:
        if name in self.batch.taps:
            self.taps[name] = hidden.clone()


def open_target(path: Path) -> Target:
    """Open a checkpoint and load its weights in float32.

    Raises:
        CheckpointError: no reader knows the path, or its files cannot be used.
    """
    refused = []
    for reader in _FORMATS:
        reason = reader.why_not(path)
        if reason is None:
            return _load(reader.open(path))
        refused.append(reason)
    raise CheckpointError(f"{path} is no checkpoint that training can read", refused)


def _load(checkpoint: Checkpoint) -> Target:
    family = DecoderFamily()
    spec = family.describe(checkpoint.config, page_size=16, kv_dtype="float32")
    facts = OpFacts(device_type="cpu", dtype="float32")
    model = family.build(
        BuildRequest(
            config=checkpoint.config,
            spec=spec,
            read=checkpoint.read,
            read_packed=lambda name: None,
            ops=OpTable(_reference_ops(), facts),
            dtype="float32",
            device=torch.device("cpu"),
        )
    )
    return Target(checkpoint=checkpoint, model=model)


def _reference_ops() -> list[OpChoice]:
    def provider(op: str, make: type) -> OpProvider:
        return OpProvider(
            op=op, name="reference", build=lambda facts: make(), priority=Priority.REFERENCE
        )

    return [
        OpChoice(op=op, provider=provider(op, make), source="dspark", refused=())
        for op, make in reference.OPS.items()
    ]
