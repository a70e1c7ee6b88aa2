"""Slot ``drafter``: who proposes tokens for the target to verify."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from deepinfer_core.batch import Int32, Int64

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class DrafterContext:
    """What a drafter builder receives.

    Attributes:
        model_spec: ``ModelSpec`` of the target.
        model: the target itself (embedding, head, a block drafter it may offer), None in tests.
        device: torch device, None in tests without one.
        max_drafts: most drafts a sequence may get in a step.
        max_sequences: sequences a step may hold.
        config: the target's configuration, as in its config.json.
        read: ``name -> tensor`` of the target's checkpoint (rows of a shared head, say), None in
            tests.
        ops: the bound op table, for layers of the drafter's own, None in tests.
        dtype: computation dtype name.
        verification: "coupled" or "rejection": whether drafts are best drawn with the target's own
            noise, or with other noise and reported with their distributions.
        block_drafter: builds the target's own block drafter, None where the model offers none.
    """

    model_spec: Any
    model: Any = None
    device: torch.device | None = None
    max_drafts: int = 5
    max_sequences: int = 256
    config: Mapping[str, Any] = field(factory=dict)
    read: Callable[[str], torch.Tensor] | None = None
    ops: Any = None
    dtype: str = "float32"
    verification: str = "coupled"
    block_drafter: Callable[[], BlockDrafter | None] | None = None


@frozen(kw_only=True)
class DraftRequest:
    """One sequence that could use drafts.

    Attributes:
        sequence_id: the sequence.
        token_ids: every token known, the newest (the anchor, whose state is not written yet) last.
        temperature: of the request; drafts are drawn with the request's own filters.
        seed: of this output. The token of position p is drawn with the noise of
            ``stream_key(seed, p, Purpose.FRESH)``; a drafter that draws its own with the same key
            (``draw_coupled``) agrees most often under ``coupled`` verification.
        limit: most drafts that are of use, at least 1.
        params: the request's ``SamplingParams``.
    """

    sequence_id: int
    token_ids: Sequence[int]
    temperature: float
    seed: int
    limit: int
    params: Any = None


def _ids(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _numbers(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


@frozen(kw_only=True, eq=False)
class Draft:
    """Proposals for one sequence.

    Attributes:
        token_ids: at most ``limit`` proposals for the positions after the anchor.
        confidences: for each, the estimated probability that it is accepted given that those before
            it were; same length. The one of a draft may depend on the tokens before it, never on
            the draft itself: it decides whether the draft is verified.
        distributions: [num_drafts, vocab_size], float32, the filtered distribution each was drawn
            from, with randomness that is not the target's own (``Purpose.DRAFT``); None for
            deterministic proposals (a point mass on the token). Read by ``rejection`` only.
    """

    token_ids: tuple[int, ...] = field(default=(), converter=_ids)
    confidences: tuple[float, ...] = field(default=(), converter=_numbers)
    distributions: torch.Tensor | None = None


@frozen(kw_only=True)
class DraftOutcome:
    """What became of one sequence's drafts in a step.

    Attributes:
        sequence_id: whose.
        verified: leading drafts that were judged; the rest was not looked at.
        accepted: leading drafts that were accepted.
        acceptance: probability with which each judged draft was accepted (1 minus the total
            variation distance), up to the first rejected one; only in mode ``rejection``.
    """

    sequence_id: int
    verified: int
    accepted: int
    acceptance: tuple[float, ...] = field(default=(), converter=_numbers)


@frozen(kw_only=True, eq=False)
class CommittedRows:
    """Rows of a step whose state is final: prefill, decode and accepted drafts, none else.

    Rows of one sequence are contiguous, in ascending position, and follow those of earlier steps.
    The first ones of a sequence may begin at a higher position than 0: what lies below came from a
    cached prefix, or was dropped by a truncated decoder, and is never shown.

    Attributes:
        sequence_ids: whose rows.
        query_starts: [num_sequences + 1], int32; rows ``query_starts[i]:query_starts[i+1]`` belong
            to sequence i.
        positions: [num_rows], int32.
        token_ids: [num_rows], int32.
    """

    sequence_ids: tuple[int, ...]
    query_starts: Int32
    positions: Int32
    token_ids: Int32

    @property
    def num_rows(self) -> int:
        """Rows, over all sequences."""
        return int(self.positions.shape[0])


class DraftContext(Protocol):
    """What the layers of a block drafter see of one sequence, kept by whoever drafts with it."""

    @property
    def length(self) -> int:
        """Rows that are there."""
        ...

    def first_visible(self, position: int, window: int) -> int:
        """Number of the first row at ``position - window + 1`` or later; of all with window 0."""
        ...

    def rows(self, layer: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a draft layer from a row number on, as ``context`` made them."""
        ...


class BlockDrafter(Protocol):
    """A network that drafts several tokens in one pass, then corrects them from left to right.

    It may come from a checkpoint of its own or be a part of the target (``BlockDraftModel``). It
    keeps nothing between calls: rows of context are handed out, and come back as ``DraftContext``.

    With ``lookahead`` a row is made of a position and the token after it: behind its taps stands
    that token's embedding. The row of the position before an anchor is complete only with the
    anchor; it is no context, but what ``hidden`` gets in place of the anchor's embedding.
    """

    @property
    def taps(self) -> tuple[str, ...]:
        """Target layers that it reads, see ``Drafter``."""
        ...

    @property
    def block_size(self) -> int:
        """Rows of a pass, the most drafts."""
        ...

    @property
    def window(self) -> int:
        """Context positions that any layer ever sees, 0 = all."""
        ...

    @property
    def lookahead(self) -> int:
        """Tokens after its position that a row is made of: 0 or 1."""
        ...

    def context(
        self, features: torch.Tensor, positions: Int64
    ) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Turn tapped rows into what draft layers see.

        Args:
            features: [n, num_taps * hidden_size], the taps side by side, float32; with
                ``lookahead`` hidden_size more, see above.
            positions: [n], ascending for each sequence.

        Returns:
            Per draft layer (keys, values), n rows each.
        """
        ...

    def block(
        self,
        anchors: torch.Tensor,
        positions: Sequence[int],
        contexts: Sequence[DraftContext],
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The parallel part.

        Args:
            anchors: [n, hidden_size], float32, embeddings of the newest token of each sequence;
                with ``lookahead`` the rows before them, as in ``context``.
            positions: of the anchors.
            contexts: what each sequence's block sees.
            rows: leading rows of each block that are wanted.

        Returns:
            What `correct` and `confidence_logits` are told of each row, [n, rows, anything], and
            the rows' logits before any correction, [n, rows, draft vocabulary].
        """
        ...

    def likeliest(
        self,
        anchors: torch.Tensor,
        anchor_ids: torch.Tensor,
        positions: Sequence[int],
        contexts: Sequence[DraftContext],
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draft in one go where every draft is the likeliest token; None = it cannot.

        Args:
            anchors: as for `block`.
            anchor_ids: [n] int64, the newest tokens.
            positions: as for `block`.
            contexts: as for `block`.
            rows: drafts of each sequence.

        Returns:
            Token ids [n, rows], and what `confidence_logits` says of each, [n, rows].
        """
        ...

    def embed_previous(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] int64 -> [n, rank]: the token before a row, as correction and confidence see it."""
        ...

    def correct(
        self, hidden: torch.Tensor, embedded: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What to add to a row's logits, [n, draft vocabulary], and the state for the next row.

        Args:
            hidden: [n, anything], of the row, from `block`.
            embedded: [n, rank], of the token before.
            state: of the row before, None for the first.
        """
        ...

    def confidence_logits(
        self, hidden: torch.Tensor, embedded: torch.Tensor
    ) -> torch.Tensor | None:
        """[n], logits of the probability that a row's draft is accepted; None = it cannot say."""
        ...


class BlockDraftModel(Protocol):
    """A model that carries a block drafter of its own (``Feature.BLOCK_DRAFT``)."""

    def block_drafter(self) -> BlockDrafter | None:
        """Build it; None where the checkpoint has none."""
        ...


class Drafter(Protocol):
    """A proposer of tokens. Wrong drafts cost time, never correctness.

    All calls come from the accelerator's queue, one at a time. After a step come ``judge`` (if it
    verified drafts), ``observe`` (if the drafter has taps), then ``commit`` for each of its
    sequences; ``propose`` comes before the next one.
    A drafter that raises loses its drafts of that step, and after a few times its place.

    Attributes:
        taps: target layers whose output (the residual stream) the drafter reads: "embedding",
            "layer.0", ...; the core then calls ``observe`` with them for every row that was
            committed, prefill included.
        replay_tokens: after a prefix was found in the cache, so many of its last positions are
            computed again (and not written again) for ``observe``; 0 without taps. The cache
            decides; without reuse there is nothing to replay.
    """

    taps: tuple[str, ...]
    replay_tokens: int

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """One ``Draft`` per request, in order; an empty draft is always allowed.

        Every position of a request but its newest token's was committed before.
        """
        ...

    def judge(self, outcomes: Sequence[DraftOutcome]) -> None:
        """What became of the drafts of a step; only to learn from, ``commit`` says what counts."""
        ...

    def observe(self, rows: CommittedRows, taps: Mapping[str, torch.Tensor]) -> None:
        """Rows of a step: ``taps[name]`` is [num_rows, hidden_size] on the device."""
        ...

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Positions below ``num_tokens`` are final; state for higher ones must be forgotten."""
        ...

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child starts as a copy of the parent."""
        ...

    def release(self, sequence_id: int) -> None:
        """The sequence ended or was preempted; unknown ids are ignored."""
        ...
