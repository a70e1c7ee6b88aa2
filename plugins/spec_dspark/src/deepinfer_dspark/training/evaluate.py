"""How good a draft model is on answers: tau, acceptance by position, confidence."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.interfaces.drafter import DraftRequest
from deepinfer_dspark.calibration import OnlineCalibration
from deepinfer_dspark.checkpoint import DraftCheckpoint
from deepinfer_dspark.context import ContextCache
from deepinfer_dspark.drafter import DsparkDrafter
from deepinfer_dspark.network import DraftNetwork
from deepinfer_dspark.runner import DraftRunner
from deepinfer_dspark.training.blocks import Blocks, Shared, run_blocks
from deepinfer_dspark.training.data import Answer, FeatureStore, Text
from deepinfer_dspark.training.loss import target_probabilities
from deepinfer_dspark.training.target import Target

Float64 = npt.NDArray[np.float64]


@frozen(kw_only=True)
class Evaluation:
    """Figures of one group of answers.

    Attributes:
        answers: how many.
        tokens: answer tokens.
        tau: tokens a round when the answers are decoded greedily with these drafts; None if none
            of them is greedy.
        greedy_acceptance: by position, share of drafts that are the answer's own token, given that
            those before them were; greedy answers only.
        acceptance: by position, mean probability that a draft is accepted at temperature 1, given
            the answer's own tokens before it.
        expected_tau: tokens a round at temperature 1, from those.
    """

    answers: int
    tokens: int
    tau: float | None
    greedy_acceptance: tuple[float, ...]
    acceptance: tuple[float, ...]
    expected_tau: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON, rounded."""
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "tau": None if self.tau is None else round(self.tau, 3),
            "greedy_acceptance": [round(value, 3) for value in self.greedy_acceptance],
            "acceptance": [round(value, 3) for value in self.acceptance],
            "expected_tau": round(self.expected_tau, 3),
        }


class Evaluator:
    """A draft model beside its target.

    Args:
        checkpoint: the draft model.
        target: what it drafts for.
        features: folder of computed features.
        max_tokens: longer texts are cut.
    """

    def __init__(
        self, checkpoint: DraftCheckpoint, target: Target, features: Path, max_tokens: int = 1024
    ) -> None:
        self.network = DraftNetwork(checkpoint.shape)
        self.network.load_state_dict(checkpoint.network_state())
        self.network.eval()
        self.shared = Shared.of(
            target.embedding(), target.head_weight(), checkpoint.draft_vocab_ids
        )
        self._store = FeatureStore(target, self.network.shape.taps, features, max_tokens)

    def evaluate(self, answers: Iterable[Answer]) -> dict[str, Evaluation]:
        """Return figures by domain, and of all under "all"."""
        groups: dict[str, _Sums] = defaultdict(lambda: _Sums(self.network.shape.block_size))
        for answer in answers:
            text = self._store.get(answer)
            if len(text.token_ids) - text.start < 3:
                continue
            probabilities, matches = self._one(text)
            for name in (answer.domain or "other", "all"):
                groups[name].add(answer, text, probabilities, matches)
        return {name: sums.finished() for name, sums in sorted(groups.items())}

    @torch.no_grad()
    def _one(self, text: Text) -> tuple[Tensor, Tensor]:
        """Acceptance at temperature 1, and greedy matches, of a block at each anchor."""
        anchors = torch.arange(text.start + 1, len(text.token_ids) - 1)
        blocks = run_blocks(self.network, self.shared, text, anchors)
        acceptance = self._acceptance(text, blocks)
        drafts = self._greedy(text, anchors, blocks)
        following = blocks.positions + 1
        inside = following < len(text.token_ids)
        truth = text.token_ids[following.clamp(max=len(text.token_ids) - 1)]
        return acceptance, (drafts == truth) & inside

    def _acceptance(self, text: Text, blocks: Blocks) -> Tensor:
        at = blocks.positions.clamp(max=len(text.token_ids) - 1)
        markov = self.network.markov_head
        embedded = markov.embed(text.token_ids[at])
        logits = blocks.base + markov.markov_w2(markov.rows(blocks.hidden, embedded))
        p = logits.softmax(-1)
        found = torch.minimum(p, target_probabilities(self.shared, text, at)).sum(-1)
        return found.masked_fill(~blocks.inside, torch.nan)

    def _greedy(self, text: Text, anchors: Tensor, blocks: Blocks) -> Tensor:
        """[num_anchors, block_size] tokens drafted one after another."""
        markov, found = self.network.markov_head, []
        previous, state = text.token_ids[anchors], markov.start(blocks.hidden[:, 0])
        for row in range(self.network.shape.block_size):
            out, state = markov.step(blocks.hidden[:, row], markov.embed(previous), state)
            best = (blocks.base[:, row] + markov.markov_w2(out)).argmax(-1)
            previous = self.shared.draft_vocab_ids[best]
            found.append(previous)
        return torch.stack(found, 1)

    @torch.no_grad()
    def confidences(self, answers: Iterable[Answer]) -> tuple[Float64, Float64]:
        """Logits of the confidence head and true survivals, [num_blocks, block_size] each."""
        head = self.network.confidence_head
        logits, labels = [], []
        for answer in answers:
            text = self._store.get(answer)
            if head is None or len(text.token_ids) - text.start < 3:
                continue
            anchors = torch.arange(text.start + 1, len(text.token_ids) - 1)
            blocks = run_blocks(self.network, self.shared, text, anchors)
            at = blocks.positions.clamp(max=len(text.token_ids) - 1)
            embedded = self.network.markov_head.embed(text.token_ids[at])
            logits.append(head(blocks.hidden, embedded).numpy())
            labels.append(self._acceptance(text, blocks).cumprod(-1).numpy())
        size = self.network.shape.block_size
        none = [np.zeros((0, size))]
        return (
            np.concatenate(logits or none).astype(np.float64),
            np.concatenate(labels or none).astype(np.float64),
        )


class _Sums:
    def __init__(self, block_size: int) -> None:
        self._accepted = np.zeros(block_size)
        self._known = np.zeros(block_size)
        self._reached = np.zeros(block_size)
        self._matched = np.zeros(block_size)
        self._answers = self._tokens = 0
        self._rounds = self._greedy_tokens = 0

    def add(self, answer: Answer, text: Text, acceptance: Tensor, matches: Tensor) -> None:
        values = acceptance.numpy()
        self._accepted += np.nansum(values, 0)
        self._known += (~np.isnan(values)).sum(0)
        self._answers += 1
        self._tokens += len(text.token_ids) - text.start - 1
        if answer.temperature == 0.0:
            self._walk(matches.numpy())

    def _walk(self, matches: npt.NDArray[np.bool_]) -> None:
        """Decode an answer: each round starts where the one before ended."""
        at = 0
        while at < len(matches):
            row = matches[at]
            accepted = int(row.argmin()) if not row.all() else len(row)
            self._reached[: accepted + 1] += 1
            self._matched[:accepted] += 1
            self._rounds += 1
            self._greedy_tokens += accepted + 1
            at += accepted + 1

    def finished(self) -> Evaluation:
        acceptance = self._accepted / np.maximum(self._known, 1)
        greedy = self._matched / np.maximum(self._reached, 1)
        return Evaluation(
            answers=self._answers,
            tokens=self._tokens,
            tau=self._greedy_tokens / self._rounds if self._rounds else None,
            greedy_acceptance=tuple(greedy.tolist()) if self._rounds else (),
            acceptance=tuple(acceptance.tolist()),
            expected_tau=1.0 + float(np.cumprod(acceptance).sum()),
        )


def pass_ms(network: DraftNetwork, shared: Shared, context: int, repeats: int = 20) -> float:
    """Measure one draft pass for one sequence behind some context; milliseconds, the median."""
    shape = network.shape
    runner = DraftRunner(
        network,
        shared.head,
        shared.embedding[shape.mask_token_id],
        shape.block_size,
        shared.draft_vocab_ids,
    )
    drafter = DsparkDrafter(
        runner,
        embed=shared.embedding.__getitem__,
        draft_vocab_ids=shared.draft_vocab_ids,
        vocab_size=shared.embedding.shape[0],
        calibration=OnlineCalibration(shape.block_size, (), every=0),
        replay_tokens=0,
    )
    cache = ContextCache(runner.window)
    features = torch.zeros(context, shape.decoder.hidden_size * len(shape.target_layer_ids))
    positions = np.arange(context)
    cache.append(positions, runner.context(features, positions))
    drafter.adopt(0, cache)
    request = DraftRequest(
        sequence_id=0,
        token_ids=[0] * (context + 1),
        temperature=0.0,
        seed=0,
        limit=shape.block_size,
    )
    times = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        drafter.propose([request])
        times.append(1000 * (time.perf_counter() - started))
    return float(np.median(times[3:]))
