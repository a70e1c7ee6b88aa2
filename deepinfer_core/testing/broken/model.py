"""Wrong model families: the builtin decoder with something changed on its way in or out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from deepinfer_core.errors import CheckpointError
from deepinfer_core.interfaces.model import BuildRequest, Model, ModelSpec, StepContext
from deepinfer_core.models.decoder import DecoderFamily
from deepinfer_core.testing.contracts.base import Factory


class _View:
    """A step with some of its attributes replaced."""

    def __init__(self, step: StepContext, **replaced: Any) -> None:
        self._step = step
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


class _Changed:
    """A model that does what another does; subclasses change something."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.spec = model.spec

    def forward(self, step: StepContext) -> Tensor:
        return self._model.forward(step)

    def head(self, hidden: Tensor) -> Tensor:
        return self._model.head(hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._model.embed(token_ids)


class _CountsRows(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        positions = torch.arange(step.batch.num_tokens)
        return super().forward(_View(step, positions=positions))


class _ForgetsEarlierChunks(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: Any) -> Tensor:
            k[0], v[0] = 0, 0
            return step.attend(layer, q, k, v, params)

        return super().forward(_View(step, attend=attend))


class _ReturnsTheLastRows(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        count = step.batch.num_tokens
        last = torch.arange(count - len(step.logit_rows), count)
        return super().forward(_View(step, logit_rows=last))


class _ReturnsAllRows(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        return super().forward(_View(step, logit_rows=torch.arange(step.batch.num_tokens)))


class _NeedsALogit(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        if not len(step.logit_rows):
            return torch.zeros(0, self.spec.hidden_size)
        return super().forward(step)


class _SeesTheNextToken(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        return super().forward(_View(step, token_ids=step.token_ids.roll(-1)))


class _Meets(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        hidden = super().forward(step)
        return hidden + 0.01 * (step.batch.num_sequences - 1)


class _AttendsAcross(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: Any) -> Tensor:
            return step.attend(layer, q, k, v.mean(0, keepdim=True).expand_as(v), params)

        return super().forward(_View(step, attend=attend))


class _IgnoresOrder(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: Any) -> Tensor:
            return 0 * step.attend(layer, q, k, v, params)

        return super().forward(_View(step, attend=attend))


class _Drifts(_Changed):
    _runs = 0

    def forward(self, step: StepContext) -> Tensor:
        self._runs += 1
        return super().forward(step) * (1 + 1e-6 * self._runs)


class _ClampsTokens(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        step.token_ids.clamp_(max=50)
        return super().forward(step)


class _NarrowLogits(_Changed):
    def head(self, hidden: Tensor) -> Tensor:
        return super().head(hidden).bfloat16()


class _RoundsHidden(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        return (super().forward(step) * 4).round() / 4


class _PassesHeadsFlat(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: Any) -> Tensor:
            return step.attend(layer, q, k.repeat_interleave(3, 1), v, params)

        return super().forward(_View(step, attend=attend))


class _SharedEmbedding(_Changed):
    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(torch.zeros_like(token_ids)) + torch.arange(len(token_ids))[:, None]


class _NoTaps(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        return super().forward(_View(step, tap=lambda name, hidden: None))


class _TapsWantedRows(_Changed):
    def forward(self, step: StepContext) -> Tensor:
        def tap(name: str, hidden: Tensor) -> None:
            step.tap(name, hidden[step.logit_rows])

        return super().forward(_View(step, tap=tap))


# --------------------------------------------------------------------------------- descriptions


class _Family(DecoderFamily):
    """The decoder family whose models are changed."""

    def __init__(self, change: Callable[[Model], Model] = lambda model: model) -> None:
        self._change = change

    def build(self, request: BuildRequest) -> Model:
        return self._change(super().build(request))


class _ReadsTwice(_Family):
    def build(self, request: BuildRequest) -> Model:
        for weight in request.spec.weights[:3]:
            request.read(weight.name)
        return super().build(request)


class _MakesWeightsUp(_Family):
    def build(self, request: BuildRequest) -> Model:
        def read(name: str) -> Tensor:
            if name.endswith("down_proj.weight"):
                shapes = {weight.name: weight.shape for weight in request.spec.weights}
                return torch.zeros(shapes[name])
            return request.read(name)

        return super().build(attrs.evolve(request, read=read))


class _ForgetsALayer(_Family):
    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        spec = super().describe(config, page_size=page_size, kv_dtype=kv_dtype)
        first, *rest = spec.groups
        return attrs.evolve(spec, groups=(attrs.evolve(first, layers=first.layers[:-1]), *rest))


class _FixedPages(_Family):
    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        return super().describe(config, page_size=16, kv_dtype=kv_dtype)


class _OneProblemAtATime(_Family):
    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        if "vocab_size" not in config:
            raise CheckpointError("vocab_size is missing")
        return super().describe(config, page_size=page_size, kv_dtype=kv_dtype)


class _FillsIn(_Family):
    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        config = {"vocab_size": 32000, "num_attention_heads": 4, **config}
        return super().describe(config, page_size=page_size, kv_dtype=kv_dtype)


def _model(change: Callable[[Model], Model]) -> Factory:
    return lambda context: _Family(change)


def _family(family: type[_Family]) -> Factory:
    return lambda context: family()


CORRECT: Factory = _family(_Family)

BROKEN: dict[str, tuple[Factory, str]] = {
    "positions are row numbers": (_model(_CountsRows), "test_chunks_give_the_same_as_the_whole"),
    "the first row of a chunk is lost": (
        _model(_ForgetsEarlierChunks),
        "test_chunks_give_the_same_as_the_whole",
    ),
    "the last rows come back": (
        _model(_ReturnsTheLastRows),
        "test_only_the_wanted_rows_come_back",
    ),
    "all rows come back": (_model(_ReturnsAllRows), "test_only_the_wanted_rows_come_back"),
    "a chunk without logits is skipped": (
        _model(_NeedsALogit),
        "test_chunks_without_logits_are_computed_too",
    ),
    "a row sees the next token": (
        _model(_SeesTheNextToken),
        "test_later_tokens_change_nothing_before",
    ),
    "the number of sequences leaks": (_model(_Meets), "test_sequences_do_not_meet"),
    "values are mixed across the batch": (
        _model(_AttendsAcross),
        "test_later_tokens_change_nothing_before",
    ),
    "earlier tokens are ignored": (_model(_IgnoresOrder), "test_earlier_tokens_matter"),
    "results drift": (_model(_Drifts), "test_a_model_keeps_nothing"),
    "token ids are clamped in place": (_model(_ClampsTokens), "test_the_step_is_left_alone"),
    "logits are bfloat16": (_model(_NarrowLogits), "test_logits_are_float32_and_finite"),
    "hidden states are rounded": (_model(_RoundsHidden), "test_narrow_arithmetic_stays_close"),
    "keys have too many heads": (_model(_PassesHeadsFlat), "test_sequences_do_not_meet"),
    "embeddings depend on the place": (_model(_SharedEmbedding), "test_embed_looks_rows_up"),
    "taps are not offered": (_model(_NoTaps), "test_layers_can_be_tapped"),
    "taps hold the wanted rows only": (_model(_TapsWantedRows), "test_layers_can_be_tapped"),
    "weights are read twice": (_family(_ReadsTwice), "test_each_weight_is_read_once"),
    "a weight is silently zero": (_family(_MakesWeightsUp), "test_each_weight_is_read_once"),
    "a layer is in no group": (_family(_ForgetsALayer), "test_the_description_is_consistent"),
    "the page size is fixed": (
        _family(_FixedPages),
        "test_the_description_follows_its_arguments",
    ),
    "one problem at a time": (
        _family(_OneProblemAtATime),
        "test_a_bad_configuration_is_refused_with_every_problem",
    ),
    "missing fields are made up": (
        _family(_FillsIn),
        "test_a_bad_configuration_is_refused_with_every_problem",
    ),
}
