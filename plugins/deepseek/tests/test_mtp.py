"""V3's layer for drafts: what it proposes, however rows come, and that answers stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from deepinfer_core.interfaces.drafter import CommittedRows, DraftRequest
from deepinfer_core.testing.checkpoint_files import write_safetensors
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.tiny import byte_level_tokenizer
from deepinfer_deepseek.testing.engines import Runner, bits
from deepinfer_deepseek.testing.tiny import tokens_of
from deepinfer_deepseek.v3 import V3Family

dspark = pytest.importorskip("deepinfer_dspark")

LAYERS, HIDDEN = 3, 36
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 272,
    "hidden_size": HIDDEN,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "eos_token_id": 256,
}
TAP = f"layer.{LAYERS - 1}"


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for spec in V3Family().describe(CONFIG, page_size=16, kv_dtype="float32").weights:
        values = torch.randn(spec.shape, generator=generator)
        found[spec.name] = 1 + 0.2 * values if "norm" in spec.name else 0.3 * values
    return found


@pytest.fixture(scope="module")
def tiny_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    write_safetensors(folder, weights(), CONFIG)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def reference(made: Tensor, tokens: list[int]) -> Tensor:
    """[len(tokens) - 1, vocab]: by transformers' layer, of the token two after each position.

    Args:
        made: [len(tokens) - 1, hidden], the target's last layer, not normed.
        tokens: the sequence.
    """
    models = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    transformers = pytest.importorskip("transformers")
    named = {key: value for key, value in CONFIG.items() if key != "architectures"}
    config = transformers.DeepseekV3Config(
        **{**named, "num_hidden_layers": LAYERS + 1}, attn_implementation="eager"
    )
    found, base = weights(), f"model.layers.{LAYERS}."
    layer = models.DeepseekV3DecoderLayer(config, LAYERS).eval()
    own = {name.removeprefix(base): value for name, value in found.items() if base in name}
    experts = range(CONFIG["n_routed_experts"])
    state = {name: value for name, value in own.items() if ".experts." not in name}
    place = "mlp.experts."
    state[f"{place}gate_up_proj"] = torch.stack(
        [
            torch.cat([own[f"{place}{e}.{name}_proj.weight"] for name in ("gate", "up")])
            for e in experts
        ]
    )
    state[f"{place}down_proj"] = torch.stack([own[f"{place}{e}.down_proj.weight"] for e in experts])
    extra = {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"}
    report = layer.load_state_dict(state, strict=False)
    assert set(report.unexpected_keys) == extra
    assert not report.missing_keys

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    after = found["model.embed_tokens.weight"][tokens[1:]]
    made = rms(rms(made, found["model.norm.weight"]), own["hnorm.weight"])
    x = torch.cat([rms(after, own["enorm.weight"]), made], -1) @ own["eh_proj.weight"].t()
    at = torch.arange(len(x)).unsqueeze(0)
    angles = models.DeepseekV3RotaryEmbedding(config)(x, at)
    hidden = torch.full((len(x), len(x)), -torch.inf).triu(1)
    with torch.no_grad():
        x = layer(
            x.unsqueeze(0),
            attention_mask=hidden[None, None],
            position_ids=at,
            position_embeddings=angles,
        )
    x = (x[0] if isinstance(x, tuple) else x).reshape(len(at[0]), -1)
    return rms(x, own["shared_head.norm.weight"]) @ found["lm_head.weight"].t()


@frozen(kw_only=True)
class Shape:
    """As much of a model's description as a drafter looks at."""

    vocab_size: int = CONFIG["vocab_size"]


def drafter_of(model: ModelHarness) -> Any:
    """Drafter ``mtp1`` beside a model that is driven by hand."""
    loading = pytest.importorskip("deepinfer_dspark.loading")
    interfaces = pytest.importorskip("deepinfer_core.interfaces.drafter")
    context = interfaces.DrafterContext(
        model_spec=Shape(),
        model=model.model,
        block_drafter=model.model.block_drafter,  # type: ignore[attr-defined]
    )
    return loading.build_mtp1(dspark.Mtp1Config(), context)


@pytest.mark.parametrize("chunks", [[41], [1] * 41, [7, 1, 1, 20, 12]], ids=str)
def test_drafts_are_those_of_transformers(tiny_mtp: Path, chunks: list[int]) -> None:
    model, tokens = ModelHarness(tiny_mtp, family=V3Family()), tokens_of(42, 2)
    drafter = drafter_of(model)
    assert (drafter.taps, drafter.replay_tokens) == ((TAP,), 64)
    model.open(1)
    made, at = [], 0
    for size in chunks:
        model.step({1: tokens[at : at + size]}, rows={1: []}, taps=[TAP])
        made.append(model.taps[TAP])
        rows = CommittedRows(
            sequence_ids=(1,),
            query_starts=np.array([0, size], np.int32),
            positions=np.arange(at, at + size, dtype=np.int32),
            token_ids=np.array(tokens[at : at + size], np.int32),
        )
        drafter.observe(rows, model.taps)
        at += size
        drafter.commit(1, at)
    request = DraftRequest(sequence_id=1, token_ids=tokens, temperature=0.0, seed=0, limit=5)
    wanted = reference(torch.cat(made), tokens)[-1]
    drafter.fork(1, 2)
    for sequence in (1, 2):
        (draft,) = drafter.propose([evolve(request, sequence_id=sequence)])
        assert draft.token_ids == (int(wanted.argmax()),)
    # What is not certain any more is not drafted from.
    drafter.commit(2, 40)
    (draft,) = drafter.propose([evolve(request, sequence_id=2)])
    assert draft.token_ids == ()
    runner = drafter._runner
    held = drafter._pairs.anchors([request])
    found = runner.block(held, [41], [drafter._contexts[1]], 1)[1][0, 0]
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4


def engine(
    model: Path, drafter: str, *plugins: Any, cache: str = "pages", **options: Any
) -> Runner:
    return Runner(
        model,
        [dspark, *plugins],
        options,
        cache=cache,
        drafter=drafter,
        budget="fixed",
        attention="paged",
    )


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=str)
@pytest.mark.parametrize("batch", [7, 64])
def test_answers_are_the_same_with_drafts(
    tiny_mtp: Path, params: dict[str, Any], batch: int
) -> None:
    found = []
    for drafter in ("none", "mtp1"):
        runner = engine(tiny_mtp, drafter, max_batch_tokens=batch)
        try:
            names = [
                runner.submit(tokens_of(length, length), max_tokens=24, n=n, **params)
                for length, n in ((37, 1), (11, 2), (1, 1))
            ]
            results = runner.finish(*names)
        finally:
            runner.engine.close()
        assert all(result.error is None for result in results)
        found.append(([bits(result) for result in results], sum(r.drafted for r in results)))
    (plain, none), (drafted, judged) = found
    assert drafted == plain
    assert none == 0
    assert judged > 60


def test_good_drafts_are_accepted(tmp_path: Path) -> None:
    """Layers that add nothing: the next token depends on the newest alone, and drafts know it."""
    tensors = weights()
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
        elif "norm" in name:
            value.fill_(1.0)
        elif name.endswith("eh_proj.weight"):
            value.copy_(torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1))
    write_safetensors(tmp_path, tensors, CONFIG)
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    runner = engine(tmp_path, "mtp1")
    try:
        found = runner.run(tokens_of(9), max_tokens=30)
        steps = runner.engine.stats().num_steps
    finally:
        runner.engine.close()
    assert found.accepted == found.drafted >= 14
    assert steps < 20


def test_answers_are_the_same_after_a_hit(tiny_mtp: Path) -> None:
    """Context of the layer has gaps then, and a part of it is computed again."""
    prefix = pytest.importorskip("deepinfer_prefix")
    prompt, found = [*tokens_of(96), *tokens_of(9, 1)], []
    for drafter in ("none", "mtp1"):
        runner = engine(tiny_mtp, drafter, prefix, cache="prefix")
        try:
            runner.run(tokens_of(96), max_tokens=1)
            results = [runner.run(prompt, max_tokens=12) for _ in range(2)]
        finally:
            runner.engine.close()
        assert all(result.cached_tokens > 20 for result in results)
        assert (results[-1].drafted > 5) is (drafter == "mtp1")
        found.append([bits(result) for result in results])
    assert found[0] == found[1]


def test_a_checkpoint_without_the_layer_offers_none(tmp_path: Path) -> None:
    """Whoever stores a model anew often leaves it out, whatever the configuration says."""
    kept = {name: value for name, value in weights().items() if f"layers.{LAYERS}." not in name}
    write_safetensors(tmp_path, kept, CONFIG)
    model = ModelHarness(tmp_path, family=V3Family())
    assert model.model.block_drafter() is None  # type: ignore[attr-defined]


def test_copies_and_further_layers_are_left_alone() -> None:
    config = {**CONFIG, "num_nextn_predict_layers": 2}
    spec = V3Family().describe(config, page_size=16, kv_dtype="float32")
    assert spec.ignored_weights == (
        r"model\.layers\.3\.(embed_tokens|shared_head\.head)\.weight",
        r"model\.layers\.4\..*",
    )
    assert {weight.name.split(".")[2] for weight in spec.weights if weight.optional} == {"3"}
