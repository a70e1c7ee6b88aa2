"""Configurations of the decoder family: defaults, variants, and every problem in one error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_core.errors import CheckpointError
from deepinfer_core.models import gemma3, gpt_oss
from deepinfer_core.models.config import ARCHITECTURES, DecoderConfig, read_config
from deepinfer_core.models.reading import ConfigReader, refuse

SMALLEST: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def config_of(prefix: str = "Llama", **fields: Any) -> DecoderConfig:
    extra = MOE if prefix == "Qwen3Moe" else {}
    return read_config({**SMALLEST, **extra, "architectures": [f"{prefix}ForCausalLM"], **fields})


def problems_of(prefix: str = "Llama", **fields: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        config_of(prefix, **fields)
    return "\n".join(caught.value.problems)


def test_every_missing_field_is_named_at_once() -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config({"architectures": ["LlamaForCausalLM"]})
    found = "\n".join(caught.value.problems)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
        assert f"{key}: expected a positive whole number, got None" in found
    assert "num_attention_heads" in found


def test_all_problems_are_listed_together() -> None:
    found = problems_of(
        hidden_act="gelu",
        rms_norm_eps=0,
        mlp_bias="yes",
        num_key_value_heads=3,
        rope_parameters={"rope_type": "spiral"},
        eos_token_id="</s>",
    )
    for part in ("hidden_act", "rms_norm_eps", "mlp_bias", "not a multiple", "spiral", "eos"):
        assert part in found
    assert len(found.splitlines()) == 6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, -1.0, True, "1"])
def test_a_number_is_finite_and_above_0(value: Any) -> None:
    for key in ("rms_norm_eps", "rope_theta"):
        assert problems_of(**{key: value}).startswith(f"{key}: expected a positive number, got")


def test_a_context_without_end_is_refused() -> None:
    found = problems_of(max_position_embeddings=10**13)
    assert found == "max_position_embeddings: at most 16777216 are supported, got 10000000000000"


@pytest.mark.parametrize(
    ("prefix", "field"),
    [("Llama", "num_hidden_layers"), ("SmolLM3", "num_hidden_layers"), ("Qwen3Moe", "num_experts")],
)
def test_what_is_counted_one_by_one_has_an_end(prefix: str, field: str) -> None:
    assert f"{field}: at most 10000 are supported" in problems_of(prefix, **{field: 10**9})


@pytest.mark.parametrize("value", [3, True, "all", {"a": 1}])
@pytest.mark.parametrize(
    ("prefix", "field"),
    [("Mistral", "layer_types"), ("SmolLM3", "no_rope_layers"), ("Qwen3Moe", "mlp_only_layers")],
)
def test_lists_are_lists(prefix: str, field: str, value: Any) -> None:
    window = {"sliding_window": 8} if prefix == "Mistral" else {}
    assert f"{field}: expected a list" in problems_of(prefix, **window, **{field: value})


@pytest.mark.parametrize("value", [3, "Llama", [], [3], [[]], {"a": 1}, None])
def test_an_architecture_is_the_first_of_a_list(value: Any) -> None:
    with pytest.raises(CheckpointError, match="is not one of"):
        read_config({**SMALLEST, "architectures": value})


ODD: tuple[Any, ...] = (None, 0, -1, 2**70, 1.5, "x", [], [1], [None], [[1]], {"a": 1}, True)


@pytest.mark.parametrize("read", [gemma3.read_config, gpt_oss.read_config])
def test_odd_values_are_refused_by_every_family(read: Callable[[dict[str, Any]], Any]) -> None:
    fields = ("layer_types", "rope_parameters", "rope_scaling", "sliding_window", *SMALLEST)
    for field in fields:
        for value in ODD:
            with contextlib.suppress(CheckpointError):
                read({**SMALLEST, "sliding_window": 8, field: value})


def test_options_of_rotation_come_in_a_table() -> None:
    assert "rope_scaling: expected a table, got 'yarn'" in problems_of(rope_scaling="yarn")


def test_an_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="'MambaForCausalLM' is not one of LlamaForCausalLM"):
        read_config({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(CheckpointError, match=r"'\?'"):
        read_config({})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads: expected a positive whole number"),
        ({"vocab_size": 7.5}, "vocab_size: expected a positive whole number, got 7.5"),
        ({"vocab_size": True}, "vocab_size: expected a positive whole number, got True"),
        ({"head_dim": 7}, "head_dim 7 with partial_rotary_factor 1: cannot rotate 7"),
        ({"hidden_size": 2}, "head_dim: expected a positive whole number"),
        ({"rope_theta": -1}, "rope_theta: expected a positive number, got -1"),
        ({"partial_rotary_factor": 2.0}, "cannot rotate 16 numbers"),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope type 'linear' needs a positive number for 'factor', got None",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope type 'llama3' needs a positive number for 'high_freq_factor'",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic' is not one of"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "different ones by layer type",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "only where short_factor is long_factor",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "needs 4 numbers in short_factor",
        ),
    ],
)
def test_one_problem(fields: dict[str, Any], expected: str) -> None:
    assert expected in problems_of(**fields)


@pytest.mark.parametrize(
    ("prefix", "fields", "expected"),
    [
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("Mistral", {"sliding_window": -3}, "sliding_window: expected a positive whole number"),
        ("Qwen3Moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 6"),
        ("Qwen3Moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types has 1 entries for 4 layers",
        ),
        (
            "Qwen2",
            {"layer_types": ["linear_attention"] * 4},
            "layer_types: linear_attention not supported",
        ),
        (
            "Qwen2",
            {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4},
            "switched off",
        ),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": -1},
            "max_window_layers",
        ),
    ],
)
def test_one_problem_of_an_architecture(prefix: str, fields: dict[str, Any], expected: str) -> None:
    assert expected in problems_of(prefix, **fields)


def test_missing_fields_mean_what_they_mean_for_the_architecture() -> None:
    """Configurations leave out what equals the default of their own architecture."""
    smol = config_of("SmolLM3")
    assert smol.tied
    assert smol.rope.theta == 2_000_000
    assert smol.use_rope == (True, True, True, False)
    assert not config_of("Llama").tied
    assert config_of("Llama").rope.theta == 10_000
    assert config_of("Qwen3").head_dim == 128
    assert config_of("Qwen2").head_dim == 8
    fields = {key: value for key, value in SMALLEST.items() if key != "num_key_value_heads"}
    assert read_config(fields).num_kv_heads == 4


def test_old_and_new_names_of_rope_mean_the_same() -> None:
    old = config_of(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = config_of(rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0})
    assert (old.rope.kind, old.rope.theta) == (new.rope.kind, new.rope.theta) == ("linear", 5e5)
    assert config_of(rope_scaling=None).rope.kind == "default"


def test_the_original_length_is_found_wherever_it_stands() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    key = "original_max_position_embeddings"
    outside: dict[str, Any] = {key: 32}
    assert config_of(rope_scaling={**scaling, key: 64}).rope.options[key] == 64
    assert config_of(rope_scaling=scaling, **outside).rope.options[key] == 32
    assert config_of(rope_scaling=scaling, max_position_embeddings=256).rope.options[key] == 256


def test_windows_of_each_architecture() -> None:
    on = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert config_of("Llama", **on).windows == (0, 0, 0, 0)
    assert config_of("Mistral", sliding_window=8).windows == (8, 8, 8, 8)
    assert config_of("Mistral", sliding_window=None).windows == (0, 0, 0, 0)
    assert config_of("Qwen2", **on).windows == (0, 0, 0, 8)
    assert config_of("Qwen3", **on | {"use_sliding_window": False}).windows == (0, 0, 0, 0)
    assert config_of("Qwen3Moe", **on).windows == (8, 8, 8, 8)
    assert config_of("SmolLM3", **on).windows == (0, 0, 0, 8)
    listed = ["sliding_attention", "full_attention"] * 2
    assert config_of("Qwen2", **on, layer_types=listed).windows == (8, 0, 8, 0)
    assert config_of("Qwen2", use_sliding_window=True, sliding_window=8).windows == (0, 0, 0, 0)


def test_biases_of_each_architecture() -> None:
    def biases(prefix: str) -> tuple[bool, bool, bool]:
        found = config_of(prefix, attention_bias=True, mlp_bias=True)
        return found.qkv_bias, found.output_bias, found.mlp_bias

    assert biases("Llama") == biases("SmolLM3") == (True, True, True)
    assert biases("Qwen3") == biases("Qwen3Moe") == (True, True, False)
    assert biases("Qwen2") == (True, False, False)
    assert biases("Mistral") == (False, False, False)
    assert not config_of("Llama").qkv_bias


def test_layers_with_experts() -> None:
    assert config_of("Qwen3Moe").experts == (True,) * 4
    assert config_of("Qwen3Moe", mlp_only_layers=[0, 3]).experts == (False, True, True, False)
    assert config_of("Qwen3Moe", decoder_sparse_step=2).experts == (False, True, False, True)
    assert config_of("Llama").experts == (False,) * 4
    newer = {"num_experts": None, "num_local_experts": 6}
    config = {**SMALLEST, **MOE, "architectures": ["Qwen3MoeForCausalLM"], **newer}
    del config["num_experts"]
    assert read_config(config).num_experts == 6


def test_end_ids() -> None:
    assert config_of(eos_token_id=[1, 2]).eos_token_ids == (1, 2)
    assert config_of(eos_token_id=7).eos_token_ids == (7,)
    assert config_of(eos_token_id=None).eos_token_ids == ()


def test_the_built_in_plugin_offers_every_architecture() -> None:
    from deepinfer_core.components import Slot
    from deepinfer_core.plugins import PluginHost

    component = PluginHost().find(Slot.MODEL, "decoder")
    assert component.tags == set(ARCHITECTURES)


def test_fields_are_read_by_kind_and_every_problem_is_noted() -> None:
    read = ConfigReader({"n": 0, "ids": [3, 1], "act": "silu", "bad": "x"})
    assert (read.count("n"), read.count("missing", 2), read.integers("ids")) == (0, 2, (3, 1))
    read.only({"act": "silu", "missing": 7})
    assert read.problems == []
    assert (read.count("bad"), read.integers("bad")) == (0, ())
    read.only({"bad": "y"})
    assert read.problems == [
        "bad: expected a whole number >= 0, got 'x'",
        "bad: expected a list of whole numbers, got 'x'",
        "bad: only 'y' is supported, got 'x'",
    ]
    refuse("Acme", [])
    with pytest.raises(CheckpointError, match="configuration of Acme cannot be used"):
        refuse("Acme", read.problems)
