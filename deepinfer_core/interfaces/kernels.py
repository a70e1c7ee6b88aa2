"""Slot ``kernels``: sets of op providers.

An op is a named operation of ``deepinfer_core.ops`` with a reference in plain torch that is also
its specification. A provider is one implementation of one op, with a reason when it cannot serve.

What an implementation may say of itself, as attributes, beside the methods of its reference:

* ``packed_formats`` of "linear", "embedding" and "moe_experts": ``prepare`` takes weights as they
  are stored, that is ``PackedTensor``s of these formats and dense tensors of any dtype. Without it
  a weight is expanded and converted to the computation dtype first.
* ``may_round`` of "linear": ``prepare`` takes ``may_round=True`` for weights whose input may be
  rounded to 8 bits. Models say so of projections where that was measured to matter least
  (attention's output, feed-forwards), not of queries, keys, values, routers and heads.
* ``from_linear(handle)`` of "embedding": makes its handle of what "linear" of the same set packed,
  so that a tied head is kept once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from deepinfer_core.components import Priority, Verified
from deepinfer_core.interfaces.attention import AttentionParams

if TYPE_CHECKING:
    import torch

    from deepinfer_core.interfaces.model import StepContext


@frozen(kw_only=True)
class OpFacts:
    """What a provider may judge by when the op table is bound.

    Attributes:
        device_type: torch device type ("cpu", "cuda", "npu").
        dtype: computation dtype of the model.
        weight_format: "dense" or the name of a packed format ("q4_1", "fp8_32x32", ...).
        shapes: op dependent sizes, e.g. ``{"in": 576, "out": 1536}``; empty where unknown.
        batch_invariant: whether results must not depend on the other rows.
        attention: name of the attention component, "" where unknown.
    """

    device_type: str
    dtype: str
    weight_format: str = "dense"
    shapes: dict[str, int] = field(factory=dict)
    batch_invariant: bool = False
    attention: str = ""


def _no_objection(facts: OpFacts) -> str | None:
    return None


@frozen(kw_only=True)
class OpProvider:
    """One implementation of one op.

    Attributes:
        op: name of the op in ``deepinfer_core.ops.table``.
        name: unique among the providers of the op.
        build: returns the implementation, an object with the methods of the op's reference.
        why_not: why this provider cannot serve, or None.
        priority: higher wins among those without an objection.
        verified: how far its results were compared with the reference.
        batch_invariant: whether its rows are independent of each other bit for bit.
        handles_of: ops whose handles it takes; it serves only where its own set serves those.
    """

    op: str
    name: str
    build: Callable[[OpFacts], Any]
    why_not: Callable[[OpFacts], str | None] = _no_objection
    priority: int = Priority.PORTABLE
    verified: Verified = Verified.TESTED
    batch_invariant: bool = False
    handles_of: tuple[str, ...] = ()


@frozen(kw_only=True)
class GatedActivation:
    """What an expert makes of gate and up: ``g * sigmoid(alpha * g) * (u + offset)``.

    ``g`` is the gate, at most ``limit``; ``u`` is up, between ``-limit`` and ``limit``. By default
    that is ``silu(gate) * up``.
    """

    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0


@frozen(kw_only=True, eq=False)
class DecoderLayerWeights:
    """One layer as "decoder_layers" receives it; handles are those of op "linear".

    Attributes:
        input_norm: [hidden_size].
        middle_norm: [hidden_size].
        head_norms: weights of the norms of query and key heads, [head_dim] each, or None.
        qkv: projection to queries, keys and values, one after another.
        output: projection of attention's result.
        gate_up: projection to gate and up, one after another.
        down: projection back.
        use_rope: whether queries and keys are rotated.
        params: constants of attention.
    """

    input_norm: torch.Tensor
    middle_norm: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    qkv: Any
    output: Any
    gate_up: Any
    down: Any
    use_rope: bool
    params: AttentionParams


@frozen(kw_only=True, eq=False)
class DecoderWeights:
    """All layers of a decoder with dense feed-forwards.

    Attributes:
        embedding: handle of op "embedding".
        layers: the layers, in order.
        final_norm: [hidden_size].
        cos: [num_positions, rotary_dim / 2], float32; halves rotate against each other.
        sin: likewise.
        norm_eps: of every norm.
        hidden_size: width of the residual stream.
        intermediate_size: width of a feed-forward.
        num_heads: query heads.
        num_kv_heads: key heads.
        head_dim: numbers per head.
        groups: per layer, index of its cache group.
    """

    embedding: Any
    layers: tuple[DecoderLayerWeights, ...]
    final_norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    norm_eps: float
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[int, ...]


class DecoderLayers(Protocol):
    """Optional op "decoder_layers": a whole forward pass in one call.

    ``deepinfer_core.models.decoder.Decoder.forward_by_ops`` is its reference.
    """

    def prepare(self, weights: DecoderWeights) -> Any:
        """Make a handle, or None where these weights cannot be served; runs once at load."""
        ...

    def run(self, step: StepContext, handle: Any) -> torch.Tensor:
        """See ``Model.forward``; taps included."""
        ...


@frozen(kw_only=True)
class KernelsContext:
    """What a kernels builder receives."""

    device_type: str


class KernelSet(Protocol):
    """What the ``kernels`` slot builds."""

    def providers(self) -> Sequence[OpProvider]:
        """Every provider of the set; called once when the op table is bound."""
        ...
