"""What every model family must do, checked on a tiny model with random weights.

The model runs on dense attention in float64, so only its own arithmetic is tested here. Whether it
is the *right* model, only a reference can tell: override ``expected_logits`` where there is one.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepinfer_core.capabilities import Feature
from deepinfer_core.components import Slot
from deepinfer_core.errors import CheckpointError
from deepinfer_core.interfaces.model import (
    Model,
    ModelContext,
    ModelFamily,
    ModelSpec,
)
from deepinfer_core.testing.contracts.base import Contract, skip
from deepinfer_core.testing.numerics import Family, assert_close, assert_same_bits
from deepinfer_core.testing.oracle import DenseState, DenseStep, Part, reference_model

TINY_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}

PROMPT = (5, 61, 7, 7, 30, 2, 44, 19, 0, 66, 13, 28, 7)


class ModelContract(Contract):
    """Laws of the slot ``model``.

    Attributes:
        model_config: configuration of a tiny model of the family.
        required: keys of it that the family cannot do without.
        device_type: torch device type.
    """

    slot = Slot.MODEL
    features = frozenset({Feature.TAPS})
    model_config: ClassVar[Mapping[str, Any]] = TINY_LLAMA
    required: ClassVar[tuple[str, ...]] = ("vocab_size", "num_attention_heads")
    device_type: ClassVar[str] = "cpu"

    def expected_logits(
        self, weights: Mapping[str, Tensor], token_ids: Sequence[int]
    ) -> Tensor | None:
        """[len(token_ids), vocab_size] by another implementation, or None if there is none.

        Args:
            weights: every tensor the family's spec names, float32.
            token_ids: one sequence from its start.
        """
        return None

    # --------------------------------------------------------------------------------- building

    def family(self) -> ModelFamily:
        """Return the family under test."""
        built: ModelFamily = self.make(ModelContext())
        return built

    def spec(self) -> ModelSpec:
        """Return the description of the tiny model."""
        return self.family().describe(self.model_config, page_size=16, kv_dtype="float32")

    @staticmethod
    def weight(name: str, shape: Sequence[int]) -> Tensor:
        """The random weight of a name: near one for norms, scaled by width for others."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        numbers = torch.randn(*shape, generator=generator)
        if len(shape) == 1:
            return 0.1 * numbers + (0.0 if name.endswith("bias") else 1.0)
        return numbers * shape[-1] ** -0.5 * 1.5

    def build(self, dtype: str = "float32", reads: Counter[str] | None = None) -> Model:
        """Build the tiny model; ``reads`` counts the weights it asks for."""
        family = self.family()
        shapes = {weight.name: weight.shape for weight in self.spec().weights}
        reads = Counter() if reads is None else reads

        def read(name: str) -> Tensor:
            reads[name] += 1
            if name not in shapes:
                raise CheckpointError(f"no tensor {name!r}: the spec does not name it")
            return self.weight(name, shapes[name])

        return reference_model(
            family, self.model_config, read, dtype=dtype, device=self.device_type
        )

    def run(
        self,
        model: Model,
        parts: Sequence[Part],
        rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
    ) -> tuple[Tensor, Any]:
        """Run a step; returns the logits of ``rows`` (default: all), and the step."""
        count = sum(len(part.token_ids) for part in parts)
        rows = range(count) if rows is None else rows
        step = DenseStep(model.spec, parts, rows, torch.device(self.device_type), taps=taps)
        with torch.inference_mode():
            hidden = model.forward(step)
            assert tuple(hidden.shape) == (len(rows), model.spec.hidden_size), (
                f"forward returns {tuple(hidden.shape)} for {len(rows)} rows"
            )
            return model.head(hidden).cpu(), step

    def logits(self, model: Model, tokens: Sequence[int], chunks: Sequence[int] = ()) -> Tensor:
        """Logits of every row of one sequence, computed in chunks."""
        state, begin, found = DenseState(), 0, []
        for chunk in chunks or (len(tokens),):
            part = Part(state=state, token_ids=tokens[begin : begin + chunk])
            found.append(self.run(model, [part])[0])
            begin += chunk
        return torch.cat(found)

    def close(self, found: Tensor, expected: Tensor, what: str, dtype: str = "float32") -> None:
        """Raise AssertionError unless logits agree as well as a model of the dtype can."""
        assert_close(found, expected.double(), dtype=dtype, family=Family.MODEL, what=what)

    # ------------------------------------------------------------------------------ description

    def test_the_description_is_consistent(self) -> None:
        """Sizes are positive, names are unique, and every layer is in a cache group.

        In exactly one, if the model reaches its state by layer (``StepContext.attend``).
        """
        spec = self.spec()
        assert spec.architecture in self.model_config["architectures"]
        for size in (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.max_position):
            assert size >= 1
        names = [weight.name for weight in spec.weights]
        assert names
        assert len(set(names)) == len(names), "a weight is named twice"
        layers = sorted({layer for group in spec.groups for layer in group.layers})
        assert layers == list(range(spec.num_layers)), f"layers in groups: {layers}"
        assert len({group.name for group in spec.groups}) == len(spec.groups)
        for group in spec.groups:
            assert spec.num_query_heads % group.num_kv_heads == 0

    def test_the_description_follows_its_arguments(self) -> None:
        """Page size and dtype of the groups are those asked for; the same call says the same.

        A page may hold more or fewer tokens where entries do, and partial state be wider.
        """
        family = self.family()
        for page_size, kv_dtype in ((16, "float32"), (64, "bfloat16")):
            spec = family.describe(self.model_config, page_size=page_size, kv_dtype=kv_dtype)
            for size in {group.page_size for group in spec.groups}:
                assert size % page_size == 0 or page_size % size == 0, f"pages of {size}"
            assert spec.groups[0].page_size == page_size
            assert spec.groups[0].dtype == kv_dtype
            again = family.describe(self.model_config, page_size=page_size, kv_dtype=kv_dtype)
            assert again == spec

    def test_a_bad_configuration_is_refused_with_every_problem(self) -> None:
        """Missing fields raise one CheckpointError that names all of them."""
        config = {
            key: value for key, value in self.model_config.items() if key not in self.required
        }
        message = ""
        try:
            self.family().describe(config, page_size=16, kv_dtype="float32")
        except CheckpointError as error:
            message = str(error)
        assert message, f"a configuration without {self.required} was taken"
        unnamed = [key for key in self.required if key not in message]
        assert not unnamed, f"{unnamed} not named in: {message}"

    def test_each_weight_is_read_once(self) -> None:
        """``build`` reads every weight that is not optional, each once, and no others."""
        reads: Counter[str] = Counter()
        self.build(reads=reads)
        weights = {weight.name: weight for weight in self.spec().weights}
        unknown = sorted(set(reads) - set(weights))
        assert not unknown, f"not in the spec: {unknown}"
        missing = sorted(
            name for name, weight in weights.items() if not weight.optional and not reads[name]
        )
        assert not missing, f"never read: {missing}"
        assert not [name for name, count in reads.items() if count > 1], f"read twice: {reads}"

    # ---------------------------------------------------------------------------------- results

    def test_logits_are_float32_and_finite(self) -> None:
        """``head`` gives [n, vocab_size] float32, also where the model computes in bfloat16."""
        for dtype in ("float32", "bfloat16"):
            model = self.build(dtype)
            found = self.logits(model, PROMPT)
            assert found.dtype == torch.float32
            assert tuple(found.shape) == (len(PROMPT), model.spec.vocab_size)
            assert bool(torch.isfinite(found).all())
            assert float(found.std()) > 0, "all logits are equal"

    def test_logits_agree_with_the_reference(self) -> None:
        """Where ``expected_logits`` gives some, logits agree with it."""
        spec = self.spec()
        weights = {weight.name: self.weight(weight.name, weight.shape) for weight in spec.weights}
        expected = self.expected_logits(weights, PROMPT)
        if expected is None:
            skip("no other implementation to compare with")
        self.close(self.logits(self.build(), PROMPT), expected, "logits")

    def test_narrow_arithmetic_stays_close(self) -> None:
        """In bfloat16 the logits are those of float32 within the rounding of a few layers."""
        wide = self.logits(self.build(), PROMPT)
        narrow = self.logits(self.build("bfloat16"), PROMPT)
        self.close(narrow, wide, "bfloat16 against float32", dtype="bfloat16")

    def test_only_the_wanted_rows_come_back(self) -> None:
        """``forward`` returns the rows of ``logit_rows``, in that order; there may be none."""
        model = self.build()
        whole = self.logits(model, PROMPT)
        for rows in ([len(PROMPT) - 1], [0, 3, 4, 11], [2], []):
            part = Part(state=DenseState(), token_ids=PROMPT)
            found, _ = self.run(model, [part], rows)
            self.close(found, whole[rows], f"rows {rows}")

    def test_later_tokens_change_nothing_before(self) -> None:
        """No row sees a later token."""
        model = self.build()
        whole = self.logits(model, PROMPT)
        changed = self.logits(model, (*PROMPT[:6], 1, 2, 3))
        self.close(changed[:6], whole[:6], "rows before the change")
        shorter = self.logits(model, PROMPT[:4])
        self.close(shorter, whole[:4], "rows of a shorter prompt")

    def test_earlier_tokens_matter(self) -> None:
        """A row sees the tokens before it, and their order."""
        model = self.build()
        whole = self.logits(model, PROMPT)[-1]
        for other in ((9, *PROMPT[1:]), (PROMPT[1], PROMPT[0], *PROMPT[2:])):
            difference = (self.logits(model, other)[-1] - whole).abs().max()
            assert float(difference) > 1e-4, f"{other} gives the same as {PROMPT}"

    def test_chunks_give_the_same_as_the_whole(self) -> None:
        """State written by earlier chunks, and the positions given, are all that is needed."""
        model = self.build()
        whole = self.logits(model, PROMPT)
        for chunks in ([1] * len(PROMPT), [5, 8], [12, 1], [3, 1, 1, 8]):
            self.close(self.logits(model, PROMPT, chunks), whole, f"chunks of {chunks}")

    def test_chunks_without_logits_are_computed_too(self) -> None:
        """A chunk of which no logits are wanted still leaves its state in every layer."""
        model = self.build()
        whole = self.logits(model, PROMPT)
        state = DenseState()
        self.run(model, [Part(state=state, token_ids=PROMPT[:7])], [])
        found, step = self.run(model, [Part(state=state, token_ids=PROMPT[7:])], [5])
        self.close(found, whole[-1:], "the last row")
        assert step.attended == list(range(model.spec.num_layers)), "layers were left out"

    def test_sequences_do_not_meet(self) -> None:
        """In a mixed batch every sequence gets what it gets alone."""
        model = self.build()
        alone = [self.logits(model, tokens) for tokens in (PROMPT, PROMPT[3:9], (8,))]
        states = [DenseState(), DenseState(), DenseState()]
        self.run(model, [Part(state=states[0], token_ids=PROMPT[:-1])], [])
        parts = [
            Part(state=states[2], token_ids=(8,)),
            Part(state=states[0], token_ids=PROMPT[-1:]),
            Part(state=states[1], token_ids=PROMPT[3:9]),
        ]
        found, _ = self.run(model, parts)
        self.close(found, torch.cat([alone[2], alone[0][-1:], alone[1]]), "a mixed batch")

    def test_a_model_keeps_nothing(self) -> None:
        """All state lives in the step: the same step gives the same bits, whatever ran before."""
        model = self.build()
        first = self.logits(model, PROMPT)
        self.logits(model, PROMPT[::-1])
        assert_same_bits(self.logits(model, PROMPT), first, "the same prompt again")

    def test_the_step_is_left_alone(self) -> None:
        """Token ids, positions and rows of the step are as they were."""
        model = self.build()
        part = Part(state=DenseState(), token_ids=PROMPT)
        _, step = self.run(model, [part], [0, 12])
        assert step.token_ids.tolist() == list(PROMPT)
        assert step.positions.tolist() == list(range(len(PROMPT)))
        assert step.logit_rows.tolist() == [0, 12]

    def test_embed_looks_rows_up(self) -> None:
        """``embed`` gives [n, hidden_size]; each id has its own row, wherever it stands."""
        model = self.build()
        ids = torch.tensor([3, 1, 3, 0, model.spec.vocab_size - 1], device=self.device_type)
        with torch.inference_mode():
            found = model.embed(ids).cpu()
            single = model.embed(ids[1:2]).cpu()
        assert tuple(found.shape) == (5, model.spec.hidden_size)
        assert_same_bits(found[0], found[2], "the row of one id")
        assert_same_bits(found[1:2], single, "the row of one id alone")
        assert not torch.equal(found[0], found[1])

    def test_layers_can_be_tapped(self) -> None:
        """Every ``layer.N`` that the batch asks for is offered, [num_tokens, hidden_size]."""
        self.needs_feature(Feature.TAPS)
        model = self.build()
        part = Part(state=DenseState(), token_ids=PROMPT)
        names = tuple(f"layer.{layer}" for layer in range(model.spec.num_layers))
        _, step = self.run(model, [part], [12], names)
        for name in names:
            assert name in step.taps, f"{name} was not offered"
            shape = tuple(step.taps[name].shape)
            assert shape == (len(PROMPT), model.spec.hidden_size), f"{name} is {shape}"
