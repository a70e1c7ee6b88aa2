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
        shapes: sizes by name, of the model "heads" and "head_dim"; empty where unknown.
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


@frozen(kw_only=True, eq=False)
class DraftLayerWeights:
    """One layer of a draft model as "draft_block" receives it; handles are those of op "linear".

    Attributes:
        input_norm: [hidden_size].
        middle_norm: [hidden_size].
        head_norms: as in ``DecoderLayerWeights``.
        qkv: projection of a block's rows to queries, keys and values.
        keys_values: projection of context rows to keys and values.
        output: projection of attention's result.
        gate_up: projection to gate and up.
        down: projection back.
    """

    input_norm: torch.Tensor
    middle_norm: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    qkv: Any
    keys_values: Any
    output: Any
    gate_up: Any
    down: Any


@frozen(kw_only=True, eq=False)
class DraftBlockWeights:
    """A block drafter of plain decoder layers.

    Attributes:
        context: handle, target layer outputs side by side -> [hidden_size].
        context_norm: [hidden_size].
        layers: the layers, in order.
        final_norm: [hidden_size].
        head: handle, [hidden_size] -> what is wanted of each row.
        mask: [hidden_size], the input of every row of a block but its first.
        cos: as in ``DecoderWeights``.
        sin: likewise.
        norm_eps: of every norm.
        hidden_size: width of the residual stream.
        intermediate_size: width of a feed-forward.
        num_heads: query heads.
        num_kv_heads: key heads.
        head_dim: numbers per head.
    """

    context: Any
    context_norm: torch.Tensor
    layers: tuple[DraftLayerWeights, ...]
    final_norm: torch.Tensor
    head: Any
    mask: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    norm_eps: float
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@frozen(kw_only=True, eq=False)
class DraftPast:
    """What one sequence's block sees of the past in one layer.

    Attributes:
        keys: [n, num_kv_heads, head_dim], float32.
        values: likewise.
        unseen: for each row of the block, how many of the first positions it does not see.
    """

    keys: torch.Tensor
    values: torch.Tensor
    unseen: Sequence[int]


@frozen(kw_only=True, eq=False)
class DraftChainWeights:
    """Markov and confidence heads of a block drafter (DSpark, arXiv 2607.05147).

    Behind its logits each row has ``parts``: what it adds to ``inner``'s outputs (none for
    "vanilla"), then, with ``says``, one number that it adds to the confidence's logit.

    Attributes:
        kind: "vanilla", "gated" or "rnn".
        table: [vocab_size, rank], embeds the token before a row.
        inner: gated: [rank, rank], of the embedding; rnn: [3 * rank, 2 * rank], of state and
            embedding; None for vanilla.
        sure: [rank], what the embedding adds to the confidence, None for nothing.
        bias: handle of op "linear", [rank] -> [draft_vocab_size].
        ids: [draft_vocab_size] int64, token ids.
        says: whether there is a confidence head.
    """

    kind: str
    table: torch.Tensor
    inner: torch.Tensor | None
    sure: torch.Tensor | None
    bias: Any
    ids: torch.Tensor
    says: bool


class DraftBlock(Protocol):
    """Optional op "draft_block": the parts of a draft pass, each in one call.

    Rows of a block see the past, less what is ``unseen``, and all rows of their block. Norms,
    rotation and feed-forward are those of a decoder layer. ``DraftRunner`` of ``deepinfer_dspark``
    computes the same op by op.
    """

    def prepare(self, weights: DraftBlockWeights) -> Any:
        """Make a handle, or None where these weights cannot be served; runs once at load."""
        ...

    def context(
        self, features: torch.Tensor, positions: torch.Tensor, handle: Any
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of context rows.

        Args:
            features: [n, inputs of ``context``], float32.
            positions: [n], int64.
            handle: from `prepare`.

        Returns:
            Per layer (keys, values), [n, num_kv_heads, head_dim] float32 each.
        """
        ...

    def run(
        self,
        anchors: torch.Tensor,
        positions: Sequence[int],
        block_size: int,
        pasts: Sequence[Sequence[DraftPast]],
        wanted: int,
        handle: Any,
    ) -> torch.Tensor:
        """[n, wanted, outputs of ``head``], float32.

        Args:
            anchors: [n, hidden_size], float32, the first row of each block.
            positions: of the anchors; the rows behind them follow.
            block_size: rows of a block.
            pasts: by layer and sequence.
            wanted: leading rows of a block that are asked for.
            handle: from `prepare`.
        """
        ...

    def prepare_chain(self, weights: DraftChainWeights) -> Any:
        """Make a handle for `chain`; runs once at load."""
        ...

    def chain(
        self, rows: torch.Tensor, anchors: torch.Tensor, handle: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft the likeliest tokens from left to right.

        Args:
            rows: [n, wanted, draft_vocab_size + parts], float32.
            anchors: [n] int64, the tokens before the first rows.
            handle: from `prepare_chain`.

        Returns:
            Token ids [n, wanted], the first of several that are equally likely, and logits of
            confidence [n, wanted], undefined without a confidence head.
        """
        ...


class LatentVectors(Protocol):
    """Vectors that rows may see, each of which is key and value at once."""

    @property
    def vectors(self) -> torch.Tensor:
        """[num_slots, dim]; what no row sees may be anything."""
        ...

    @property
    def slots(self) -> torch.Tensor:
        """[n, m], int64; anything where hidden."""
        ...

    @property
    def hidden(self) -> torch.Tensor:
        """[n, m], bool."""
        ...


class LatentAttention(Protocol):
    """Optional op "latent_attention": rows attend to vectors that were chosen for each of them.

    ``attend`` of ``deepinfer_deepseek.attention`` is its reference. It serves only models whose
    attention component keeps such vectors (``OpFacts.attention``).
    """

    def serves(self, num_heads: int, dim: int) -> bool:
        """Whether to ask it; otherwise a model computes the reference."""
        ...

    def run(
        self,
        q: torch.Tensor,
        seen: Sequence[LatentVectors],
        *,
        scale: float,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """[n, num_heads, dim]; zero where a row sees nothing.

        Args:
            q: [n, num_heads, dim].
            seen: what rows see, in several memories.
            scale: factor on scores.
            sinks: [num_heads], float32, a logit in the softmax's denominator, not scaled.
        """
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
