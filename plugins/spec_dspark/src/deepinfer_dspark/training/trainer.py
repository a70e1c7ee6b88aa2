"""The training loop: resumable, with an average of the weights that can be used at any time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, field, frozen
from torch import Tensor

from deepinfer_core.errors import CheckpointError, ConfigError
from deepinfer_dspark import checkpoint as files
from deepinfer_dspark.network import DraftNetwork
from deepinfer_dspark.shape import read_shape
from deepinfer_dspark.training.blocks import Shared
from deepinfer_dspark.training.data import UNKNOWN, Answer, FeatureStore, Text, read_answers
from deepinfer_dspark.training.loss import LossWeights, Scores, score
from deepinfer_dspark.training.start import adopt, draft_config, draft_vocabulary, initialise
from deepinfer_dspark.training.target import Target

STATE = "state.pt"
REREAD = 50
"""Steps after which the file of answers is looked at again: it may still grow."""


@frozen(kw_only=True)
class TrainOptions:
    """What is trained, and how.

    Attributes:
        layers: draft layers.
        block_size: drafts of a pass.
        target_layer_ids: target layers read.
        draft_vocab_size: tokens that can be drafted.
        markov_rank: width of the sequential head.
        markov_head_type: "vanilla", "gated" or "rnn".
        window: context positions a draft layer sees, 0 = all.
        mask_token_id: stands in rows after the anchor.
        steps: optimiser steps in all.
        texts_per_step: texts of a step.
        anchors_per_text: blocks of a text in a step.
        max_tokens: longer texts are cut.
        learning_rate: peak.
        warmup_steps: steps over which it rises.
        decay_share: share of all steps, the last ones, over which it falls to 0.
        average: decay of the running average of the weights.
        single_share: share of the steps that train blocks of one row, twice as many: the first
            draft decides most, and alone it costs a fraction.
        prompt_share: share of the anchors that lie in prompts instead of answers.
        check_every: steps between checks on held-back answers, which also save.
        check_share: one answer in so many is held back.
        check_texts: held-back answers used, at most.
        seed: of the order of texts and anchors.
        loss: weights of the terms at the end.
        cross_entropy_steps: steps over which the cross-entropy's weight falls from 1 to its own.
    """

    layers: int = 1
    block_size: int = 5
    target_layer_ids: tuple[int, ...] = (8, 19, 28)
    draft_vocab_size: int = 4096
    markov_rank: int = 64
    markov_head_type: str = "gated"
    window: int = 512
    mask_token_id: int = 4
    steps: int = 4000
    texts_per_step: int = 4
    anchors_per_text: int = 48
    max_tokens: int = 640
    learning_rate: float = 6e-4
    warmup_steps: int = 60
    decay_share: float = 0.3
    average: float = 0.99
    single_share: float = 0.5
    prompt_share: float = 0.25
    check_every: int = 100
    check_share: int = 20
    check_texts: int = 24
    seed: int = 1
    loss: LossWeights = field(factory=LossWeights)
    cross_entropy_steps: int = 1500


class Trainer:
    """Trains one draft model in a folder.

    Args:
        target: the frozen target.
        options: what and how; a run that goes on must have the same shape.
        answers: file of answers, which may still grow.
        folder: state, log and checkpoints.
        features: folder of features, to be shared by runs; None = one in ``folder``.
        start: draft model to begin with; None = the target's own last layers.
        report: told of each check's figures.

    Raises:
        ConfigError: there are no answers yet, or ``start`` has another shape than the options say.
        CheckpointError: a run cannot be gone on with.
    """

    def __init__(
        self,
        target: Target,
        options: TrainOptions,
        *,
        answers: Path,
        folder: Path,
        features: Path | None = None,
        start: files.DraftCheckpoint | None = None,
        report: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._target, self._options, self._path = target, options, answers
        self._folder, self._report = folder, report
        self._answers: list[Answer] = []
        self._held: list[Answer] = []
        self._lines = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._random = random.Random(options.seed)
        self._reread()
        self.step, self.cpu_s, self.tokens = 0, 0.0, 0
        state = self._stored()
        self.config = state["config"] if state else self._new_config()
        vocab = state["vocab"] if state else self._new_vocab(start)
        self.network = DraftNetwork(read_shape(self.config, str(folder)))
        head = target.head_weight()
        self.shared = Shared.of(target.embedding(), head, vocab)
        names = list(self.network.shape.taps)
        self._store = FeatureStore(
            target, names, features or folder / "features", options.max_tokens
        )
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=options.learning_rate, weight_decay=0.0, fused=True
        )
        if state:
            self._resume(state)
        else:
            if start is None:
                initialise(self.network, target)
            else:
                adopt(self.network, vocab, start)
            self.average = [p.detach().clone() for p in self.network.parameters()]

    # ------------------------------------------------------------------ beginning

    def _new_config(self) -> dict[str, Any]:
        options = self._options
        last = self._target.num_layers - 1
        if not all(-1 <= layer < last for layer in options.target_layer_ids):
            raise ConfigError(
                f"target layers {list(options.target_layer_ids)}: this target allows -1 to "
                f"{last - 1} (its last layer is what the drafter is to predict)"
            )
        return draft_config(
            self._target.checkpoint.config,
            layers=options.layers,
            block_size=options.block_size,
            mask_token_id=options.mask_token_id,
            target_layer_ids=options.target_layer_ids,
            markov_rank=options.markov_rank,
            markov_head_type=options.markov_head_type,
            draft_vocab_size=options.draft_vocab_size,
            window=options.window,
        )

    def _new_vocab(self, start: files.DraftCheckpoint | None) -> Tensor:
        if start is not None and start.shape.draft_vocab_size == self._options.draft_vocab_size:
            return start.draft_vocab_ids
        if not self._answers:
            raise ConfigError(f"{self._path} holds no answers yet")
        vocab_size = self._target.model.spec.vocab_size
        return draft_vocabulary(self._answers, vocab_size, self._options.draft_vocab_size)

    def _stored(self) -> dict[str, Any] | None:
        path = self._folder / STATE
        if not path.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(path, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"cannot go on from {path}: {error}") from error
        return state

    def _resume(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.average = list(state["average"])
        self.step, self.cpu_s, self.tokens = state["step"], state["cpu_s"], state["tokens"]
        self._random.seed(self._options.seed + self.step)

    def _reread(self) -> None:
        for answer in read_answers(self._path, skip=self._lines):
            self._lines = answer.index + 1
            if len(answer.answer) < 2 + UNKNOWN:
                continue
            if len(answer.prompt) + 2 > self._options.max_tokens:
                continue
            if answer.index % self._options.check_share == 0:
                self._held.append(answer)
            else:
                self._answers.append(answer)

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Train to the last step; saves at every check and at the end."""
        options = self._options
        while self.step < options.steps:
            began = time.process_time()
            scores = self._train_step()
            self.step += 1
            if self.step % REREAD == 0:
                self._reread()
            self.cpu_s += time.process_time() - began
            last = self.step == options.steps
            if self.step % options.check_every == 0 or last or self.step == 10:
                self._check(scores)
                self.save()

    def _train_step(self) -> list[Scores]:
        options = self._options
        weights = self._weights()
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        single = self._random.random() < options.single_share
        found = []
        for _ in range(options.texts_per_step):
            answer = self._random.choice(self._answers)
            text = self._store.get(answer)
            anchors = self._anchors(text, options.anchors_per_text * (2 if single else 1))
            scores = score(self.network, self.shared, text, anchors, weights, int(single))
            (scores.loss / options.texts_per_step).backward()
            found.append(scores)
            self.tokens += len(anchors)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        decay = min(options.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            parameters = [p.detach() for p in self.network.parameters()]
            torch._foreach_lerp_(self.average, parameters, 1 - decay)
        return found

    def _rate(self) -> float:
        """The learning rate: up, level, and down to 0 at the last step."""
        options = self._options
        up = (self.step + 1) / options.warmup_steps
        left = options.steps - self.step
        down = left / max(1.0, options.decay_share * options.steps)
        return options.learning_rate * min(1.0, up, down)

    def _anchors(self, text: Text, most: int) -> Tensor:
        stop = len(text.token_ids) - 1
        early = min(round(most * self._options.prompt_share), max(0, text.start - 1))
        late = min(most - early, stop - text.start)
        picked = self._random.sample(range(1, text.start), early) if early else []
        picked += self._random.sample(range(text.start, stop), late)
        return torch.tensor(sorted(picked))

    def _weights(self) -> LossWeights:
        loss, ramp = self._options.loss, self._options.cross_entropy_steps
        left = max(0.0, 1 - self.step / ramp) if ramp else 0.0
        return LossWeights(
            cross_entropy=loss.cross_entropy + (1 - loss.cross_entropy) * left,
            l1=loss.l1,
            confidence=loss.confidence,
            decay=loss.decay,
        )

    # ------------------------------------------------------------------ checks and files

    def _check(self, scores: Sequence[Scores]) -> None:
        kept = [p.detach().clone() for p in self.network.parameters()]
        self._put(self.average)
        figures = self._figures()
        self._put(kept)
        figures = {
            "step": self.step,
            "cpu_s": round(self.cpu_s, 1),
            "answers": len(self._answers),
            "anchors": self.tokens,
            "loss": round(float(sum(s.loss.detach() for s in scores) / len(scores)), 4),
            **figures,
        }
        with (self._folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(figures) + "\n")
        self._report(figures)

    @torch.no_grad()
    def _figures(self) -> dict[str, Any]:
        """Figures on held-back answers, with the averaged weights."""
        total = torch.zeros(3, self.network.shape.block_size)
        error, texts = 0.0, self._held[: self._options.check_texts]
        for answer in texts:
            text = self._store.get(answer)
            anchors = torch.arange(text.start, len(text.token_ids) - 1, 3)
            scores = score(self.network, self.shared, text, anchors, self._options.loss)
            total += (
                torch.stack([scores.acceptance, scores.matches, torch.ones_like(scores.acceptance)])
                * scores.counts
            )
            error += float(scores.confidence_error)
        acceptance, matches, _ = (total / total[2].clamp(min=1)).tolist()
        survival = torch.tensor(acceptance).cumprod(0)
        return {
            "acceptance": [round(value, 4) for value in acceptance],
            "greedy_matches": [round(value, 4) for value in matches],
            "expected_tau": round(1 + float(survival.sum()), 4),
            "confidence_error": round(error / max(1, len(texts)), 4),
        }

    def _put(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.network.parameters(), values, strict=True):
                parameter.copy_(value)

    def save(self) -> None:
        """Write the state to go on from, and the averaged weights in both forms."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "average": self.average,
            "config": self.config,
            "vocab": self.shared.draft_vocab_ids,
            "step": self.step,
            "cpu_s": self.cpu_s,
            "tokens": self.tokens,
            "options": asdict(self._options),
        }
        partial = self._folder / (STATE + ".partial")
        torch.save(state, partial)
        partial.replace(self._folder / STATE)
        compact = files.compacted(self._public(), torch.float16)
        files.save(compact, self._folder / "compact")

    def _public(self) -> files.DraftCheckpoint:
        names = [name for name, _ in self.network.named_parameters()]
        tensors = dict(zip(names, self.average, strict=True))
        ids = self.shared.draft_vocab_ids
        vocab, rank = self.network.shape.decoder.vocab_size, self.network.shape.markov_rank
        out = tensors[files.MARKOV_OUT]
        tensors[files.MARKOV_OUT] = out.new_zeros(vocab, rank).index_copy(0, ids, out)
        embedding, head = self.shared.embedding, self._target.head_weight()
        tensors |= {files.EMBEDDING: embedding, files.HEAD: head, files.VOCAB_IDS: ids}
        return files.DraftCheckpoint(config=self.config, tensors=tensors, where=str(self._folder))

    def save_public(self) -> None:
        """Write the averaged weights in the public layout."""
        files.save(self._public(), self._folder / "public")
