"""DeepSeek-V4 equals transformers on tiny models, however it is chunked and mixed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.cli.main import run
from deepinfer_core.errors import CheckpointError
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_deepseek.attention import BLOCK, Seen, attend
from deepinfer_deepseek.attention import build as build_attention
from deepinfer_deepseek.checkpoint.reader import DeepSeekFormat
from deepinfer_deepseek.testing.checkpoints import packed_config_v4, write_checkpoint
from deepinfer_deepseek.testing.tiny import TINY_V4, harness_v4, tokens_of, write_tiny_v4
from deepinfer_deepseek.v4.config import read_config
from deepinfer_deepseek.v4.model import V4Family

LENGTH = 53
"""Beyond several windows, and no multiple of a window, a page or a ratio."""

KINDS = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    16: "heavily_compressed_attention",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all entries": {"index_topk": 64},
    "first layers compressed": {"compress_ratios": [16, 4, 4, 16, 0, 4]},
    "no hashes, one copy more": {"num_hash_layers": 0, "hc_mult": 5, "swiglu_limit": 1.0},
    "odd window, coarse mixing": {
        "sliding_window": 5,
        "num_hash_layers": 6,
        "hc_eps": 1e-2,
        "hc_sinkhorn_iters": 3,
    },
}

Reference = Callable[[list[int]], Tensor]


def transformers_model(folder: Path, config: dict[str, Any]) -> Reference:
    """The same files, read by transformers: it knows the published names, too."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        pytest.skip("this transformers has no DeepSeek-V4")
    layers = config["num_hidden_layers"]
    named = {key: value for key, value in config.items() if key != "compress_ratios"}
    made = transformers.DeepseekV4Config(
        **named,
        layer_types=[KINDS[ratio] for ratio in config["compress_ratios"][:layers]],
        compress_rates={KINDS[4]: 4, KINDS[16]: 16},
    )
    model, report = transformers.DeepseekV4ForCausalLM.from_pretrained(
        folder, config=made, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model = model.eval()

    def reference(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits

    return reference


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def tiny_v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_v4(tmp_path_factory.mktemp("v4"))


@pytest.mark.parametrize("name", VARIANTS)
def test_it_equals_transformers(tmp_path: Path, name: str) -> None:
    config = {**TINY_V4, **VARIANTS[name]}
    folder = write_tiny_v4(tmp_path, seed=3, **VARIANTS[name])
    model, reference = harness_v4(folder), transformers_model(folder, config)
    for length in (1, 17, LENGTH):
        tokens = tokens_of(length, length)
        assert relative(model.logits(tokens), reference(tokens)) < 1e-4


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [7, 13, 1, 20, 12], [9, 8, 36]], ids=str)
def test_chunks_do_not_matter(tiny_v4: Path, chunks: list[int]) -> None:
    tokens = tokens_of(LENGTH)
    exact = harness_v4(tiny_v4)
    whole = exact.logits(tokens)
    assert float((exact.logits(tokens, chunks) - whole).abs().max()) < 1e-12
    rounded = harness_v4(tiny_v4, dtype="float32")
    assert torch.equal(rounded.logits(tokens, chunks), rounded.logits(tokens))


def test_neighbours_do_not_matter(tiny_v4: Path) -> None:
    sequences = {at: tokens_of(length, at) for at, length in enumerate((53, 41, 7, 1))}
    chunks = {0: [20, 1, 1, 1, 30], 1: [1, 10, 1, 20, 9], 2: [0, 3, 4], 3: [0, 0, 1]}
    model = harness_v4(tiny_v4, dtype="float32")
    mixed = model.mixed(sequences, chunks, order=[[1, 0], [2, 0, 1], [3, 2, 1, 0]])
    for at, tokens in sequences.items():
        assert torch.equal(mixed[at], model.logits(tokens)), at


def test_the_past_matters(tiny_v4: Path) -> None:
    """Through entries alone: what is changed lies beyond every window."""
    tokens, model = tokens_of(LENGTH), harness_v4(tiny_v4)
    other = model.logits([tokens[0] ^ 1, *tokens[1:]])
    assert float((model.logits(tokens)[-1] - other[-1]).abs().max()) > 1e-3


def test_blocks_of_entries_are_dense_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 16, generator=generator, dtype=torch.float64)
    vectors = torch.randn(200, 16, generator=generator, dtype=torch.float64)
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    counts = torch.tensor([[1], [BLOCK + 5], [2 * BLOCK + 1]])
    slots = torch.arange(150).expand(3, -1)
    near = Seen(vectors=vectors, slots=slots[:, :7] + 150, hidden=torch.zeros(3, 7).bool())
    far = Seen(vectors=vectors, slots=slots, hidden=slots >= counts)
    found = attend(q, [near], scale=0.3, sinks=sinks, every=far)
    for row in range(3):
        keys = torch.cat([vectors[150:157], vectors[: int(counts[row])]])
        scores = torch.cat([0.3 * q[row] @ keys.t(), sinks.unsqueeze(1)], 1)
        assert torch.allclose(found[row], scores.softmax(-1)[:, :-1] @ keys, atol=1e-14)


def test_packed_computes_what_its_plain_twin_does(tmp_path: Path) -> None:
    config, tokens = packed_config_v4(), tokens_of(23)
    found = []
    for name, plain in (("packed", False), ("plain", True)):
        folder = write_checkpoint(tmp_path / name, config, plain=plain)
        model = ModelHarness(
            DeepSeekFormat().open(folder),
            family=V4Family(),
            attention=("latent", build_attention),
        )
        found.append(model.logits(tokens))
    assert torch.equal(*found)


REAL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "expert_dtype": "fp4",
    "eos_token_id": 1,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
}
"""config.json of DeepSeek-V4-Flash."""


def test_the_public_configuration() -> None:
    config = read_config(REAL)
    assert len(config.ratios) == 43
    assert (len(config.ranked_layers), len(config.layers_of(128))) == (21, 20)
    assert config.quantization is not None
    assert (config.quantization.block, config.quantization.expert_dtype) == ((128, 128), "fp4")
    assert config.compressed_rope.theta == 160000
    # A later refresh has three layers for drafts.
    refreshed = {"num_nextn_predict_layers": 3, "compress_ratios": [*REAL["compress_ratios"], 0, 0]}
    assert read_config({**REAL, **refreshed}) == config


def test_pages_hold_whole_entries() -> None:
    groups = V4Family().describe(REAL, page_size=64, kv_dtype="bfloat16").groups
    found = {group.name: (group.page_size, len(group.layers), group.window) for group in groups}
    assert found == {
        "window": (64, 43, 128),
        "entries.r4": (64, 21, 0),
        "keys.r4": (64, 21, 0),
        "partial.r4": (16, 21, 8),
        "entries.r128": (128, 20, 0),
        "partial.r128": (16, 20, 128),
    }


def test_plan_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL))
    assert run(["plan", "--json", "--model", str(tmp_path)]) == 0
    details = json.loads(capsys.readouterr().out)["details"]
    # 21 layers of 584 and 68 bytes for 4 tokens, 20 of 584 for 128.
    assert details["published"].startswith("3,514.2 bytes of entries a token, 3.21 MB of windows")
    assert run(["inspect", "--json", str(tmp_path)]) == 1
    parts = {part["name"]: part for part in json.loads(capsys.readouterr().out)["parts"]}
    assert parts["ffn.experts"]["parameters"] == 43 * 256 * 3 * 2048 * 4096


def test_a_written_checkpoint_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "v4", packed_config_v4(), max_shard_bytes=200_000)
    assert run(["inspect", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func: only 'sqrtsoftplus'"),
        ({"compress_ratios": [0] * 5}, "compress_ratios has 5 entries for 6+1 layers"),
        ({"compress_ratios": [1] * 6}, "compress_ratios: [1] not supported"),
        ({"num_hash_layers": 7}, "num_hash_layers 7 exceeds the 6 layers"),
        ({"num_hash_layers": -1}, "num_hash_layers: expected a whole number >= 0"),
        ({"sliding_window": 4}, "sliding_window 4 is less than 5"),
        ({"index_topk": None}, "index_topk: expected a positive whole number"),
        ({"expert_dtype": "fp6", "quantization_config": {"weight_block_size": [1, 1]}}, "quant"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config({**TINY_V4, **changes})
    assert any(found.startswith(problem) for found in caught.value.problems)


def test_a_table_of_unknown_experts_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_v4(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_routed_experts": 4}))
    checkpoint = DeepSeekFormat().open(folder)
    checkpoint.read("layers.1.ffn.gate.tid2eid")[3, 1] = 4
    with pytest.raises(CheckpointError, match="tid2eid: names experts beyond 4"):
        ModelHarness(checkpoint, family=V4Family(), attention=("latent", build_attention))
