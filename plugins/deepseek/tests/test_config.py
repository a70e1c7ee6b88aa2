"""A configuration is read as a whole: every contradiction is named."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from deepinfer_core.errors import CheckpointError
from deepinfer_deepseek.config import read_config
from deepinfer_deepseek.model import V41Family
from deepinfer_deepseek.options import V41Options


def test_the_public_configuration(real: dict[str, Any]) -> None:
    config = read_config(real)
    assert config.first_decoder_layer == 20
    assert len(config.ratios) == 40
    assert [config.kv_source(layer) for layer in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [config.index_source(layer) for layer in (19, 23, 24, 39)] == [14, 20, 24, 36]
    assert config.index.key_sources == config.kv_sources
    assert config.engram is not None
    assert config.engram.num_rows == 24
    assert config.draft is not None
    assert config.draft.experts.num_experts == 128
    assert config.quantization is not None
    assert config.quantization.block == (32, 32)
    assert config.image_token_id == 129264
    assert config.rope.kind == "default"
    assert (config.compressed_rope.kind, config.compressed_rope.theta) == ("yarn", 160000)


def test_a_flat_configuration_is_the_same(real: dict[str, Any]) -> None:
    text = real.pop("text_config")
    assert read_config({**text, **real}) == read_config({**real, "text_config": text})


def test_what_is_left_out_is_as_published(real: dict[str, Any]) -> None:
    """Numbers that a model would compute with, if wrongly, without a word."""
    expected = read_config(real)
    for name in (
        *("candidate_block_size", "candidate_topk_blocks", "dspark_block_size"),
        *("dspark_markov_rank", "engram_max_ngram_size", "engram_pad_token_id", "hc_eps"),
        *("hc_mult", "hc_sinkhorn_iters", "max_position_embeddings", "n_shared_experts"),
        *("qk_rope_head_dim", "rms_norm_eps", "rope_theta", "routed_scaling_factor"),
        *("sliding_window", "swiglu_limit"),
    ):
        del real["text_config"][name]
    assert read_config(real) == expected
    assert expected.experts.temperature == 1.0
    assert expected.fp4_entries


def test_the_decoder_keeps_and_a_replay_computes_140_rows(real: dict[str, Any]) -> None:
    """A window and twelve rows more, where nothing else is said."""
    spec = V41Family(V41Options()).describe(real, page_size=128, kv_dtype="bfloat16")
    assert spec.decoder_keep == 140
    assert [group.replay_tokens for group in spec.groups if group.replay_tokens] == [140]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hc_shifted": False}, "hc_shifted: only True"),
        ({"scoring_func": "sigmoid"}, "scoring_func: only 'sqrtsoftplus'"),
        ({"compress_ratios": [0] * 42}, r"compress_ratios has 42 entries for 40\+3 layers"),
        ({"compress_ratios": [0, 0] + [4] * 38 + [0] * 3}, r"\[4\] not supported"),
        ({"compress_ratios": [0, 0] + [2] * 38 + [0] * 3}, "no layer of ratio 1"),
        ({"compress_ratios": [0, 0] + [2] * 18 + [1] * 23}, "draft layers must have ratio 0"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "kv_source_layer_ids must begin a segment"),
        ({"kv_source_layer_ids": [2, 14, 8, 20]}, "expected ascending compressed layers"),
        ({"index_source_layer_ids": [2, 14, 20]}, r"index_source_layer_ids lacks \[8\]"),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id 21 is not in"),
        ({"candidate_source_layer_id": 8}, "candidate_source_layer_id 8 is not a layer of"),
        ({"engram_num_embeddings": [1]}, "1 entries for 2 layers"),
        ({"engram_layer_ids": [1, 20]}, r"\[20\] are no layers of the encoder"),
        ({"dspark_target_layer_ids": [19, 38, 39]}, "expected layers of the decoder"),
        ({"qk_rope_head_dim": 256}, "index_head_dim 128 is less than qk_rope_head_dim 256"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok 385 exceeds"),
        ({"o_groups": 7}, "not a multiple of o_groups 7"),
        ({"sliding_window": None}, "sliding_window: expected a positive whole number"),
        ({"head_dim": "512"}, "head_dim: expected a positive whole number"),
        ({"rope_scaling": "yarn"}, "rope_scaling: expected a table, got 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": "x"}}, "rope beta_fast: exp"),
        ({"compress_rope_theta": 1}, "rope_theta 1 with rope type 'yarn'"),
        ({"max_position_embeddings": 10**13}, "max_position_embeddings: at most 16777216"),
        ({"sliding_window": 10**12}, "sliding_window: at most 16777216"),
        ({"moe_intermediate_size": 2303}, "moe_intermediate_size 2303 is odd: FP4 lies two"),
        ({"gate_temp": math.nan}, "gate_temp: expected a positive number, got nan"),
        ({"hc_eps": math.inf}, "hc_eps: expected a positive number, got inf"),
        ({"n_routed_experts": 10**12}, "n_routed_experts: at most 10000 are supported"),
        ({"hc_sinkhorn_iters": 10**12}, "hc_sinkhorn_iters: at most"),
        ({"engram_vocab_size": 10**18}, "engram_vocab_size: at most"),
        ({"engram_max_ngram_size": 10**12}, "engram_max_ngram_size: at most"),
        ({"engram_pad_token_id": 129280}, "engram_pad_token_id 129280 is beyond the vocabulary"),
        ({"engram_layer_ids": [1, 1]}, r"engram_layer_ids \[1, 1\] names a layer twice"),
        ({"engram_num_embeddings": [-1, 2]}, "expected rows of tables"),
        ({"index_k_source_layer_ids": 0}, "index_k_source_layer_ids: expected a list"),
    ],
)
def test_what_does_not_fit_is_named(
    real: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    real["text_config"].update(changes)
    with pytest.raises(CheckpointError) as caught:
        read_config(real)
    assert any(re.search(message, problem) for problem in caught.value.problems)


def test_no_more_is_chosen_than_there_can_be(real: dict[str, Any]) -> None:
    """Any large number says that all entries are wanted, and costs no memory."""
    names = ("index_topk", "candidate_topk_blocks", "candidate_block_size")
    real["text_config"].update(dict.fromkeys(names, 10**12), max_position_embeddings=64)
    index = read_config(real).index
    assert (index.topk, index.candidate_blocks, index.candidate_block_size) == (64, 64, 64)


def test_an_image_token_that_is_none_is_named(real: dict[str, Any]) -> None:
    for found in ("x", -1, True):
        with pytest.raises(CheckpointError) as caught:
            read_config({**real, "image_token_id": found})
        assert caught.value.problems == (f"image_token_id: expected a token id, got {found!r}",)


def test_an_unknown_quantisation_is_refused(real: dict[str, Any]) -> None:
    real["quantization_config"] = {"quant_method": "awq", "weight_block_size": [32, 32]}
    with pytest.raises(CheckpointError) as caught:
        read_config(real)
    assert any("quant_method: only 'fp8'" in problem for problem in caught.value.problems)
