"""Drafters ``dspark`` and ``mtp1``: a small network that reads the target's layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from deepinfer_core.interfaces.drafter import (
    BlockDrafter,
    CommittedRows,
    Draft,
    DraftOutcome,
    DraftRequest,
)
from deepinfer_core.requests import SamplingParams
from deepinfer_core.sampling import (
    MASK64,
    Candidates,
    Draw,
    Purpose,
    candidates,
    draw_coupled,
    stream_key,
)
from deepinfer_dspark.calibration import OnlineCalibration
from deepinfer_dspark.context import ContextCache, WaitingRows, feature_rows
from deepinfer_dspark.pairs import Pairs, Span

GREEDY = SamplingParams(temperature=0.0)
MOST_WAITING = 256
"""Rows of a sequence that wait to become keys and values; more are made into them at once."""


@define
class _Growing:
    """A draft in the making.

    Attributes:
        request: whose.
        limit: most drafts.
        tokens: drafted so far.
        logits: of the confidence head, if there is one.
        confidences: theirs.
        distributions: theirs, where they are wanted.
    """

    request: DraftRequest
    limit: int
    tokens: list[int] = field(factory=list)
    logits: list[float] = field(factory=list)
    confidences: list[float] = field(factory=list)
    distributions: list[Tensor] = field(factory=list)

    def finished(self) -> Draft:
        """Return the draft."""
        return Draft(
            token_ids=self.tokens,
            confidences=self.confidences,
            distributions=torch.stack(self.distributions) if self.distributions else None,
        )


class DsparkDrafter:
    """Drafts blocks semi-autoregressively; see ``deepinfer_core.interfaces.drafter.Drafter``.

    Args:
        runner: the network.
        embed: the target's embedding, [n] int64 -> [n, hidden_size].
        draft_vocab_ids: [draft_vocab_size], int64.
        vocab_size: of the target.
        calibration: temperatures of the confidence head.
        replay_tokens: positions wanted again after a prefix was found in the cache.
        independent: draw drafts with noise of their own and report distributions, as
            ``rejection`` needs it, instead of with the target's noise.
        block_size: most drafts of a pass, 0 = as many as the network makes.
        draw: op "draw"; None = its reference.
    """

    def __init__(
        self,
        runner: BlockDrafter,
        *,
        embed: Any,
        draft_vocab_ids: Tensor,
        vocab_size: int,
        calibration: OnlineCalibration,
        replay_tokens: int,
        independent: bool = False,
        block_size: int = 0,
        draw: Any = None,
    ) -> None:
        self.taps = runner.taps
        self.replay_tokens = min(replay_tokens, runner.window or replay_tokens)
        self._runner, self._embed = runner, embed
        self._ids, self._vocab_size = draft_vocab_ids, vocab_size
        self._calibration = calibration
        self._independent = independent
        self._draw = draw or Draw()
        self._block_size = block_size or runner.block_size
        self._pairs = Pairs(embed) if runner.lookahead else None
        self._contexts: dict[int, ContextCache] = {}
        self._waiting: dict[int, WaitingRows] = {}
        self._drafted: dict[int, list[float]] = {}

    # ------------------------------------------------------------------ context

    def observe(self, rows: CommittedRows, taps: Mapping[str, Tensor]) -> None:
        """Take the target's layer outputs, of which keys and values are made."""
        positions, tokens = rows.positions.astype("int64"), rows.token_ids.astype("int64")
        spans = self._spans(rows)
        wanted = None
        if sum(stop - start for _, start, stop in spans) < len(positions):
            wanted = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
            positions, tokens = positions[wanted.numpy()], tokens[wanted.numpy()]
            spans = _closed(spans)
        features = feature_rows([taps[name] for name in self.taps], wanted)
        if self._pairs is not None:
            spans, features, positions = self._pairs.join(spans, features, positions, tokens)
        if not len(positions):
            return
        full = []
        for sequence_id, start, stop in spans:
            rows_of = self._waiting.setdefault(sequence_id, WaitingRows())
            rows_of.append(positions[start:stop], features[start:stop])
            if rows_of.count >= MOST_WAITING:
                full.append(sequence_id)
        self._complete(full)

    @torch.inference_mode()
    def _complete(self, sequence_ids: Sequence[int]) -> None:
        """Turn rows that wait into keys and values. Nothing needs them before the next draft."""
        owners = [of for of in sequence_ids if of in self._waiting]
        chunks = [(of, *chunk) for of in owners for chunk in self._waiting.pop(of).chunks]
        if not chunks:
            return
        features = torch.cat([rows for _, _, rows in chunks])
        found = self._runner.context(features, np.concatenate([at for _, at, _ in chunks]))
        start = 0
        for sequence_id, positions, _ in chunks:
            part = slice(start, start + len(positions))
            cache = self._contexts.get(sequence_id)
            if cache is None:
                cache = self._contexts[sequence_id] = ContextCache(self._runner.window)
            cache.append(positions, [(k[part], v[part]) for k, v in found])
            start = part.stop

    def _spans(self, rows: CommittedRows) -> list[Span]:
        """(sequence, first row, stop): rows that later drafts can see."""
        window, starts = self._runner.window, rows.query_starts.tolist()
        found = []
        for sequence_id, start, stop in zip(rows.sequence_ids, starts, starts[1:], strict=False):
            found.append((sequence_id, max(start, stop - window) if window else start, stop))
        return found

    def judge(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn how far confidences can be trusted."""
        for outcome in outcomes:
            logits = self._drafted.get(outcome.sequence_id)
            if logits:
                self._calibration.add(
                    logits, outcome.verified, outcome.accepted, outcome.acceptance
                )

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Forget what lies beyond."""
        cache = self._contexts.get(sequence_id)
        if cache is not None:
            cache.cut(num_tokens)
        if sequence_id in self._waiting:
            self._waiting[sequence_id].cut(num_tokens)
        if self._pairs is not None:
            self._pairs.commit(sequence_id, num_tokens)

    def adopt(self, sequence_id: int, cache: ContextCache) -> None:
        """Take a context that was computed elsewhere."""
        self._contexts[sequence_id] = cache
        self._waiting.pop(sequence_id, None)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Copy the parent's context."""
        self._complete([parent_id])
        cache = self._contexts.get(parent_id)
        if cache is not None:
            self._contexts[child_id] = cache.copy()
        if self._pairs is not None:
            self._pairs.fork(parent_id, child_id)

    def release(self, sequence_id: int) -> None:
        """Forget the sequence."""
        self._contexts.pop(sequence_id, None)
        self._waiting.pop(sequence_id, None)
        self._drafted.pop(sequence_id, None)
        if self._pairs is not None:
            self._pairs.release(sequence_id)

    # ------------------------------------------------------------------ drafting

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Draft one block for each request; see ``Drafter.propose``."""
        growing = [_Growing(request, min(request.limit, self._block_size)) for request in requests]
        active = [draft for draft in growing if draft.limit > 0 and self._ready(draft.request)]
        if active:
            self._draft(active)
        self._drafted = {draft.request.sequence_id: draft.logits for draft in active}
        return [draft.finished() for draft in growing]

    def _ready(self, request: DraftRequest) -> bool:
        return self._pairs is None or self._pairs.ready(request)

    def _draft(self, active: list[_Growing]) -> None:
        self._complete([draft.request.sequence_id for draft in active])
        anchors = torch.tensor([draft.request.token_ids[-1] for draft in active])
        positions = [len(draft.request.token_ids) - 1 for draft in active]
        caches = [
            self._contexts.get(draft.request.sequence_id) or ContextCache() for draft in active
        ]
        for cache, position in zip(caches, positions, strict=True):
            cache.cut(position)
        if self._pairs is None:
            rows = self._embed(anchors).float()
        else:
            rows = self._pairs.anchors([draft.request for draft in active])
        most = max(draft.limit for draft in active)
        if all(draft.request.temperature == 0.0 for draft in active) and not self._independent:
            found = self._runner.likeliest(rows, anchors, positions, caches, most)
            if found is not None:
                self._take(active, *found)
                return
        hidden, base = self._runner.block(rows, positions, caches, most)
        self._sequential(active, anchors, hidden, base)

    def _take(self, active: list[_Growing], tokens: Tensor, logits: Tensor) -> None:
        """Drafts that were made in one go."""
        for draft, ids, sure in zip(active, tokens.tolist(), logits.tolist(), strict=True):
            draft.tokens, draft.logits = ids[: draft.limit], sure[: draft.limit]
            draft.confidences = [
                self._calibration.confidence(row, logit) for row, logit in enumerate(draft.logits)
            ]

    def _sequential(
        self, active: list[_Growing], previous: Tensor, hidden: Tensor, base: Tensor
    ) -> None:
        """The left-to-right part: each draft depends on the one before."""
        runner, state = self._runner, None
        for row in range(base.shape[1]):
            embedded = runner.embed_previous(previous)
            bias, state = runner.correct(hidden[:, row], embedded, state)
            logits = base[:, row] + bias
            sure = self._confidence_logits(hidden[:, row], embedded, logits)
            tokens = self._ids[logits.argmax(-1)].tolist()
            growing = [at for at, draft in enumerate(active) if row < draft.limit]
            drawing = [at for at in growing if active[at].request.temperature > 0.0]
            draw = self._draw_independently if self._independent else self._draw_coupled
            for at, token in draw([active[at] for at in drawing], row, logits[drawing]):
                tokens[drawing[at]] = token
            for at in growing:
                draft = active[at]
                draft.tokens.append(tokens[at])
                draft.logits.append(sure[at])
                draft.confidences.append(self._calibration.confidence(row, sure[at]))
            previous = torch.tensor(tokens)

    def _confidence_logits(self, hidden: Tensor, embedded: Tensor, logits: Tensor) -> list[float]:
        """Logits of the probability of acceptance, from what stands before: never from the draft.

        Without a confidence head the likelihood of the likeliest draft stands in.
        """
        said = self._runner.confidence_logits(hidden, embedded)
        if said is None:
            said = logits.softmax(-1).amax(-1).clamp(max=1 - 1e-6).logit()
        found: list[float] = said.tolist()
        return found

    def _draw_coupled(
        self, drafts: Sequence[_Growing], row: int, logits: Tensor
    ) -> Iterable[tuple[int, int]]:
        """Draw as the target will, with its filters and the noise of the position."""
        if not drafts:
            return ()
        requests = [draft.request for draft in drafts]
        params = [request.params or GREEDY for request in requests]
        # The noise belongs to ids of the whole vocabulary; by numpy, as `take_rows` says.
        whole = np.full((len(drafts), self._vocab_size), -np.inf, np.float32)
        whole[:, self._ids.numpy()] = logits.numpy()
        keys = stream_key(
            np.array([request.seed & MASK64 for request in requests], np.uint64).view(np.int64),
            np.array([len(request.token_ids) + row for request in requests], np.int64),
            Purpose.FRESH,
        )
        found = self._draw.run(
            torch.from_numpy(whole),
            torch.tensor([each.temperature for each in params], dtype=torch.float64),
            torch.tensor([each.top_k for each in params], dtype=torch.int64),
            torch.tensor([each.top_p for each in params], dtype=torch.float64),
            torch.tensor([each.min_p for each in params], dtype=torch.float64),
            torch.from_numpy(keys),
        )
        return enumerate(found.tolist())

    def _draw_independently(
        self, drafts: Sequence[_Growing], row: int, logits: Tensor
    ) -> Iterable[tuple[int, int]]:
        """Draw with other noise, and keep what was drawn from."""
        for at, draft in enumerate(drafts):
            request = draft.request
            kept = candidates(logits[at], request.params or GREEDY)
            named = Candidates(token_ids=self._ids[kept.token_ids], x=kept.x)
            masses = kept.masses().double()
            whole = torch.zeros(self._vocab_size)
            whole[named.token_ids] = (masses / masses.sum()).float()
            draft.distributions.append(whole)
            key = stream_key(request.seed, len(request.token_ids) + row, Purpose.DRAFT)
            yield at, draw_coupled(named, key)


def _closed(spans: list[Span]) -> list[Span]:
    """The same rows without those between them."""
    found, done = [], 0
    for sequence_id, start, stop in spans:
        found.append((sequence_id, done, done + stop - start))
        done += stop - start
    return found
