"""Draft models on disk: both forms, their conversion, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from deepinfer_core.errors import CheckpointError, CompositionError
from deepinfer_core.interfaces.drafter import DrafterContext, DraftRequest
from deepinfer_core.interfaces.model import ModelSpec
from deepinfer_core.requests import SamplingParams
from deepinfer_core.testing.contracts.drafter import SPEC
from deepinfer_dspark.checkpoint import (
    EMBEDDING,
    HEAD,
    MARKOV_OUT,
    DraftCheckpoint,
    compacted,
    completed,
    load,
    save,
)
from deepinfer_dspark.config import DsparkConfig
from deepinfer_dspark.loading import build_dspark

Maker = Callable[..., DraftCheckpoint]
REDUCED = {"draft_vocab_size": 40}
LAYOUT = {
    "fc.weight": [16, 48],
    "hidden_norm.weight": [16],
    "norm.weight": [16],
    "embed_tokens.weight": [64, 16],
    "lm_head.weight": [64, 16],
    "layers.0.self_attn.q_proj.weight": [32, 16],
    "layers.0.self_attn.k_proj.weight": [16, 16],
    "layers.0.self_attn.v_proj.weight": [16, 16],
    "layers.0.self_attn.o_proj.weight": [16, 32],
    "layers.0.self_attn.q_norm.weight": [8],
    "layers.0.self_attn.k_norm.weight": [8],
    "layers.0.mlp.gate_proj.weight": [24, 16],
    "layers.0.mlp.up_proj.weight": [24, 16],
    "layers.0.mlp.down_proj.weight": [16, 24],
    "layers.0.input_layernorm.weight": [16],
    "layers.0.post_attention_layernorm.weight": [16],
    "markov_head.markov_w1.weight": [64, 6],
    "markov_head.markov_w2.weight": [64, 6],
    "confidence_head.proj.weight": [1, 22],
    "confidence_head.proj.bias": [1],
}
"""The published layout, written down from its description, for a small config.json."""


class FakeTarget:
    """Embeds with a table."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


def target_of(checkpoint: DraftCheckpoint, **changes: Any) -> DrafterContext:
    tensors = {
        "model.embed_tokens.weight": checkpoint.tensors[EMBEDDING],
        "lm_head.weight": checkpoint.tensors[HEAD],
    }
    spec: ModelSpec = evolve(SPEC, **changes)
    return DrafterContext(
        model_spec=spec,
        model=FakeTarget(tensors["model.embed_tokens.weight"]),
        device=torch.device("cpu"),
        config={"tie_word_embeddings": False},
        read=tensors.__getitem__,
    )


def drafts(folder: Path, context: DrafterContext, temperature: float = 0.0) -> Any:
    drafter = build_dspark(DsparkConfig(checkpoint=str(folder)), context)
    params = SamplingParams(temperature=temperature, top_p=0.9 if temperature else 1.0)
    requests = [
        DraftRequest(
            sequence_id=i,
            token_ids=[7 * i % 64, i],
            temperature=temperature,
            seed=i,
            limit=4,
            params=params,
        )
        for i in range(12)
    ]
    return [(draft.token_ids, draft.confidences) for draft in drafter.propose(requests)]


def test_tensors_have_the_published_names(public_folder: Path) -> None:
    found = load_file(public_folder / "model.safetensors")
    second = {n.replace("layers.0", "layers.1"): s for n, s in LAYOUT.items() if "layers.0" in n}
    assert {name: list(tensor.shape) for name, tensor in found.items()} == LAYOUT | second


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("reduced", [{}, REDUCED])
def test_forms_convert_into_each_other(
    make_checkpoint: Maker, tmp_path: Path, kind: str, reduced: dict[str, int]
) -> None:
    public = make_checkpoint(markov_head_type=kind, **reduced)
    context = target_of(public)
    save(public, tmp_path / "public")
    save(compacted(load(tmp_path / "public")), tmp_path / "compact")
    compact = load(tmp_path / "compact")
    assert compact.is_compact
    assert EMBEDDING not in compact.tensors
    assert compact.tensors[MARKOV_OUT].shape[0] == public.shape.draft_vocab_size
    back = completed(compact, public.tensors[EMBEDDING], public.tensors[HEAD])
    save(back, tmp_path / "back")
    for name, tensor in load(tmp_path / "public").tensors.items():
        found = back.tensors[name]
        if name == MARKOV_OUT:  # rows that are never drafted need not survive
            tensor, found = tensor[public.draft_vocab_ids], found[public.draft_vocab_ids]
        assert torch.equal(tensor.to(found.dtype), found), name
    for temperature in (0.0, 0.8):
        expected = drafts(tmp_path / "public", context, temperature)
        assert drafts(tmp_path / "compact", context, temperature) == expected
        assert drafts(tmp_path / "back", context, temperature) == expected


def test_only_draftable_tokens_are_drafted(make_checkpoint: Maker, tmp_path: Path) -> None:
    public = make_checkpoint(**REDUCED)
    save(public, tmp_path)
    allowed = set(public.draft_vocab_ids.tolist())
    for temperature in (0.0, 1.0):
        for tokens, _ in drafts(tmp_path, target_of(public), temperature):
            assert set(tokens) <= allowed


def test_rejection_gets_distributions_of_independent_drafts(
    make_checkpoint: Maker, tmp_path: Path
) -> None:
    """Drafts are drawn with other noise than the target's, from what is reported."""
    public = make_checkpoint(**REDUCED)
    save(public, tmp_path)
    context = evolve(target_of(public), verification="rejection")
    drafter = build_dspark(DsparkConfig(checkpoint=str(tmp_path)), context)
    params = SamplingParams(temperature=1.0, top_k=5)
    counts = torch.zeros(64)
    expected = torch.zeros(64)
    for seed in range(400):
        request = DraftRequest(
            sequence_id=0, token_ids=[5], temperature=1.0, seed=seed, limit=2, params=params
        )
        draft = drafter.propose([request])[0]
        assert draft.distributions is not None
        assert draft.distributions.shape == (2, 64)
        assert int((draft.distributions > 0).sum(1).max()) <= 5
        counts[draft.token_ids[0]] += 1
        expected = draft.distributions[0]
    assert float((counts / 400 - expected).abs().sum()) < 0.2
    coupled = build_dspark(DsparkConfig(checkpoint=str(tmp_path)), target_of(public))
    assert coupled.propose([request])[0].distributions is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"vocab_size": 65}, "vocabulary"),
        ({"hidden_size": 32}, "hidden size"),
        ({"num_layers": 2}, "target layers"),
    ],
)
def test_a_drafter_for_another_target_is_refused_by_name(
    make_checkpoint: Maker, tmp_path: Path, changes: dict[str, int], word: str
) -> None:
    public = make_checkpoint()
    save(public, tmp_path)
    with pytest.raises(CompositionError, match=word):
        build_dspark(DsparkConfig(checkpoint=str(tmp_path)), target_of(public, **changes))


def test_the_same_shape_with_other_weights_is_refused(
    make_checkpoint: Maker, tmp_path: Path
) -> None:
    save(compacted(make_checkpoint(1)), tmp_path)
    with pytest.raises(CompositionError, match="trained for another one"):
        build_dspark(DsparkConfig(checkpoint=str(tmp_path)), target_of(make_checkpoint(2)))


def test_the_same_target_in_another_precision_fits(make_checkpoint: Maker, tmp_path: Path) -> None:
    public = make_checkpoint()
    save(compacted(public), tmp_path)
    context = target_of(public)
    noise = 0.03 * torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    context.model.table = context.model.table + noise
    build_dspark(DsparkConfig(checkpoint=str(tmp_path)), context)


def test_a_larger_block_is_refused(public_folder: Path) -> None:
    config = DsparkConfig(checkpoint=str(public_folder), block_size=5)
    with pytest.raises(CompositionError, match="block size 5"):
        build_dspark(config, DrafterContext(model_spec=SPEC))


def test_a_compact_form_needs_its_target(make_checkpoint: Maker, tmp_path: Path) -> None:
    save(compacted(make_checkpoint()), tmp_path)
    with pytest.raises(CompositionError, match="convert"):
        build_dspark(DsparkConfig(checkpoint=str(tmp_path)), DrafterContext(model_spec=SPEC))


def test_every_wrong_field_is_reported_at_once(public_folder: Path, tmp_path: Path) -> None:
    config = json.loads((public_folder / "config.json").read_text())
    del config["block_size"]
    config |= {"markov_head_type": "odd", "target_layer_ids": [3, 1], "markov_rank": "6"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(public_folder / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    text = "\n".join(caught.value.problems)
    for word in ("block_size", "markov_head_type", "target_layer_ids", "markov_rank"):
        assert word in text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "missing fc.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "unknown extra"),
        (lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}), "norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    public_folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], word: str
) -> None:
    tensors = load_file(public_folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((public_folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=word):
        load(tmp_path)


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_broken_folders_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError):
        load(tmp_path)
