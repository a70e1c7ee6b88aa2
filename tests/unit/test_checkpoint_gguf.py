"""GGUF files, written here with the ``gguf`` package and read back in Hugging Face terms."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deepinfer_core.checkpoint.dequantize import can_dequantize, dequantize
from deepinfer_core.checkpoint.gguf import GgufCheckpoint, GgufFormat
from deepinfer_core.checkpoint.gguf_config import translate_config
from deepinfer_core.checkpoint.gguf_file import COMMON_KINDS
from deepinfer_core.checkpoint.safetensors import SafetensorsCheckpoint
from deepinfer_core.errors import CheckpointError
from deepinfer_core.interfaces.checkpoint import Checkpoint, CheckpointFormat

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=False),
    "llama-tied-biased": lambda: LlamaConfig(
        **COMMON, tie_word_embeddings=True, attention_bias=True
    ),
    "smollm3": lambda: SmolLM3Config(**COMMON, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(
        **{k: v for k, v in COMMON.items() if k != "head_dim"}, tie_word_embeddings=True
    ),
    "qwen3": lambda: Qwen3Config(**COMMON, tie_word_embeddings=False),
    "qwen3moe": lambda: Qwen3MoeConfig(
        **COMMON,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
}
Tensors = Mapping[str, np.ndarray]


def rotate_rows(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave the halves of each head's rows, as converters of Llama models do."""
    half = weights.shape[0] // num_heads // 2
    split = weights.reshape(num_heads, 2, half, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def write_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if (head_dim := config.get("head_dim")) is not None:
        writer.add_key_length(head_dim)
    if (experts := config.get("num_experts", config.get("num_local_experts"))) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for name in ("bos", "eos", "pad"):
        getattr(writer, f"add_{name}_token_id")(config[f"{name}_token_id"])


def gguf_tensors(arch: str, config: Mapping[str, Any], source: Checkpoint) -> Tensors:
    """Convert tensors from Hugging Face terms as the usual converter does."""
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    plain: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name in source.names():
        weights = source.read(name).float().numpy()
        if ".experts." in name:
            before, after = name.split(".experts.")
            expert, _, rest = after.partition(".")
            stacks.setdefault(f"{before}.experts.{rest}", {})[int(expert)] = weights
            continue
        plain[str(names.get_name(name, try_suffixes=(".weight", ".bias")))] = weights
    for name, stack in stacks.items():
        target = str(names.get_name(name, try_suffixes=(".weight",)))
        plain[target] = np.stack([stack[index] for index in range(len(stack))])
    if arch in {"llama", "smollm3"}:
        for name, weights in plain.items():
            part = name.split(".")[2] if name.startswith("blk.") else ""
            if part in heads:
                plain[name] = rotate_rows(weights, heads[part])
    return plain


def write_file(
    path: Path,
    arch: str,
    config: Mapping[str, Any],
    tensors: Tensors,
    kind: str = "F32",
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, config)
    extra(writer)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, weights in tensors.items():
        if kind == "F32" or weights.ndim < 2:
            writer.add_tensor(name, weights.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(weights, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SafetensorsCheckpoint]:
    """Tiny random models saved by transformers, made on first use."""
    folder = tmp_path_factory.mktemp("saved")
    made: dict[str, SafetensorsCheckpoint] = {}

    def make(name: str) -> SafetensorsCheckpoint:
        if name not in made:
            model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32)
            generator = torch.Generator().manual_seed(len(made))
            for weights in model.parameters():
                weights.data.normal_(generator=generator)
            model.save_pretrained(folder / name)
            made[name] = SafetensorsCheckpoint(folder / name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def tiny_file(
    tmp_path_factory: pytest.TempPathFactory, saved: Callable[[str], SafetensorsCheckpoint]
) -> tuple[bytes, int]:
    """The bytes of a small valid llama file, and the length of its header."""
    source = saved("llama")
    tensors = gguf_tensors("llama", source.config, source)
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_file(path, "llama", source.config, tensors)
    header = min(int(tensor.data_offset) for tensor in gguf.GGUFReader(path).tensors)
    return path.read_bytes(), header


@pytest.fixture
def tiny(tmp_path: Path, tiny_file: tuple[bytes, int]) -> Path:
    """A small valid llama file."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_file[0])
    return path


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_reads_back_as_its_original(
    name: str, tmp_path: Path, saved: Callable[[str], SafetensorsCheckpoint]
) -> None:
    source = saved(name)
    arch = name.split("-", maxsplit=1)[0]
    tensors = gguf_tensors(arch, source.config, source)
    found = GgufCheckpoint(write_file(tmp_path / "m.gguf", arch, source.config, tensors))
    assert found.names() == source.names()
    for tensor in source.names():
        assert torch.equal(found.read(tensor), source.read(tensor)), tensor
        assert found.info(tensor).shape == tuple(source.read(tensor).shape)
    for key, value in found.config.items():
        if key in source.config and key != "rms_norm_eps":
            assert value == source.config[key], key
    assert found.config["rms_norm_eps"] == pytest.approx(source.config["rms_norm_eps"])
    theta = source.config["rope_parameters"]["rope_theta"]
    assert found.config["rope_theta"] == theta
    required = {"num_key_value_heads", "head_dim", "tie_word_embeddings", "hidden_act"}
    assert required <= found.config.keys()


def test_sizes_count_every_byte_once(tiny: Path) -> None:
    found = GgufCheckpoint(tiny)
    assert found.total_bytes == sum(found.info(name).num_bytes for name in found.names())
    assert found.total_bytes == sum(found.read(name).nbytes for name in found.names())


def test_the_classes_fit_their_interfaces(tiny: Path) -> None:
    assert isinstance(GgufFormat(), CheckpointFormat)
    assert isinstance(GgufFormat().open(tiny), Checkpoint)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_stored_formats_read_as_the_package_expands_them(
    kind: str, tmp_path: Path, saved: Callable[[str], SafetensorsCheckpoint]
) -> None:
    source = saved("llama")
    tensors = gguf_tensors("llama", source.config, source)
    found = GgufCheckpoint(write_file(tmp_path / "m.gguf", "llama", source.config, tensors, kind))
    quantization = gguf.GGMLQuantizationType[kind]
    name = "model.layers.1.mlp.down_proj.weight"
    stored = gguf.quantize(tensors["blk.1.ffn_down.weight"], quantization)
    expected = torch.from_numpy(gguf.dequantize(stored, quantization))
    assert torch.equal(found.read(name).float(), expected)
    info = found.info(name)
    assert info.num_bytes == stored.nbytes
    if kind in {"F16", "BF16"}:
        assert info.dtype == info.format == str(found.read(name).dtype).removeprefix("torch.")
        assert found.read_packed(name) is None
    else:
        assert (info.dtype, info.format) == ("float32", kind.lower())


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"])
def test_packed_rows_are_the_blocks_of_the_dense_rows(
    name: str, tmp_path: Path, saved: Callable[[str], SafetensorsCheckpoint]
) -> None:
    source = saved("llama")
    tensors = gguf_tensors("llama", source.config, source)
    found = GgufCheckpoint(write_file(tmp_path / "m.gguf", "llama", source.config, tensors, "Q4_1"))
    full = f"model.layers.0.{name}.weight"
    packed = found.read_packed(full)
    assert packed is not None
    assert packed.data.shape == (packed.shape[0], packed.shape[1] // 32 * 20)
    assert packed.shape == found.info(full).shape
    assert torch.equal(dequantize(packed.data, packed.format, packed.shape), found.read(full))
    assert found.read_packed("model.norm.weight") is None


def test_packed_experts_are_slices_of_their_stack(
    tmp_path: Path, saved: Callable[[str], SafetensorsCheckpoint]
) -> None:
    source = saved("qwen3moe")
    tensors = gguf_tensors("qwen3moe", source.config, source)
    path = write_file(tmp_path / "m.gguf", "qwen3moe", source.config, tensors, "Q8_0")
    found = GgufCheckpoint(path)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    packed = found.read_packed(name)
    assert packed is not None
    stack = gguf.quantize(tensors["blk.1.ffn_down_exps.weight"], gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(packed.data, torch.from_numpy(stack[3]))
    assert torch.equal(dequantize(packed.data, "q8_0", packed.shape), found.read(name))


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q8_0", "q2_k", "q4_k", "q6_k", "iq4_nl"])
@given(data=st.data())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_blocks_expand_to_the_same_bits_as_in_the_package(
    kind: str, data: st.DataObject
) -> None:
    quantization = gguf.GGMLQuantizationType[kind.upper()]
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[quantization]
    rows, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    seed = data.draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks * num_bytes), dtype=np.uint8)
    shape = (rows, blocks * block_size)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, quantization))
        found = dequantize(torch.from_numpy(raw), kind, shape)
    assert found.shape == shape
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_what_can_be_expanded_is_known_beforehand() -> None:
    assert can_dequantize("q6_k")
    assert not can_dequantize("q8_1")
    assert not can_dequantize("nonsense")


def test_common_block_sizes_are_those_of_the_package() -> None:
    for code, found in COMMON_KINDS.items():
        kind = gguf.GGMLQuantizationType(code)
        assert found == (kind.name.lower(), *gguf.GGML_QUANT_SIZES[kind])


def llama3_factors(head_dim: int, theta: float, factor: float, original: int) -> list[float]:
    """Divisors of the rotary frequencies, from transformers' own rule."""
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        },
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    return [float(value) for value in plain / scaled.double()]


@pytest.mark.parametrize(("theta", "factor"), [(500000.0, 8.0), (500000.0, 32.0), (1e6, 3.5)])
def test_llama3_scaling_is_recovered_from_its_divisors(
    theta: float, factor: float, tmp_path: Path, saved: Callable[[str], SafetensorsCheckpoint]
) -> None:
    source = saved("llama")
    tensors = dict(gguf_tensors("llama", source.config, source))
    divisors = llama3_factors(32, theta, factor, 8192)
    tensors["rope_freqs.weight"] = np.array(divisors, dtype=np.float32)
    config = {**source.config, "rope_parameters": {"rope_theta": theta}}
    found = GgufCheckpoint(write_file(tmp_path / "m.gguf", "llama", config, tensors))
    assert found.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": pytest.approx(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in found.names()
    assert found.names() == source.names()


def test_other_divisors_are_handed_on_as_they_are(
    tmp_path: Path, saved: Callable[[str], SafetensorsCheckpoint]
) -> None:
    source = saved("llama")
    tensors = dict(gguf_tensors("llama", source.config, source))
    divisors = llama3_factors(32, 10000.0, 4.0, 64)
    tensors["rope_freqs.weight"] = np.array(divisors, dtype=np.float32)
    found = GgufCheckpoint(write_file(tmp_path / "m.gguf", "llama", source.config, tensors))
    scaling = found.config["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == pytest.approx(divisors)
    assert scaling["attention_factor"] == 1.0


def test_linear_scaling_and_windows_come_from_the_metadata(
    tmp_path: Path, saved: Callable[[str], SafetensorsCheckpoint]
) -> None:
    source = saved("llama")
    tensors = gguf_tensors("llama", source.config, source)

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        writer.add_sliding_window(64)
        writer.add_eot_token_id(7)
        writer.add_chat_template("{{ messages }}")

    path = write_file(tmp_path / "m.gguf", "llama", source.config, tensors, extra=extra)
    found = GgufCheckpoint(path)
    assert found.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert found.config["sliding_window"] == 64
    assert found.config["architectures"] == ["MistralForCausalLM"]
    assert found.generation_config() == {"eos_token_id": [2, 7]}
    assert found.chat_template() == "{{ messages }}"


def test_a_directory_with_one_file_opens(tiny: Path) -> None:
    assert GgufFormat().why_not(tiny.parent) is None
    assert GgufFormat().open(tiny.parent).path == tiny
    (tiny.parent / "second.gguf").write_bytes(tiny.read_bytes())
    assert "2 GGUF files (second.gguf, tiny.gguf)" in (GgufFormat().why_not(tiny.parent) or "")


def test_other_files_are_turned_away_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "signature" in (GgufFormat().why_not(tmp_path / "notes.txt") or "")
    assert GgufFormat().why_not(tmp_path / "missing.gguf") is not None


def test_tensors_outlive_the_checkpoint(tiny: Path) -> None:
    checkpoint = GgufCheckpoint(tiny)
    weights = checkpoint.read("model.norm.weight")
    before = weights.clone()
    checkpoint.close()
    checkpoint.close()
    assert torch.equal(weights, before)
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("model.norm.weight")


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'nope'"):
        GgufCheckpoint(tiny).read("nope")


def test_a_truncated_file_says_so_wherever_it_was_cut(
    tiny: Path, tiny_file: tuple[bytes, int]
) -> None:
    whole, header = tiny_file
    cuts = [0, 3, 4, 10, 20, header // 3, header // 2, header - 40, header + 5, len(whole) - 1]
    for cut in cuts:
        tiny.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf") as caught:
            GgufCheckpoint(tiny)
        assert "fetch it again" in str(caught.value)
    tiny.write_bytes(whole)
    assert GgufCheckpoint(tiny).names()


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_never_fails_in_another_way(
    tiny: Path, tiny_file: tuple[bytes, int], data: st.DataObject
) -> None:
    whole, header = bytearray(tiny_file[0]), tiny_file[1]
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    damaged = tiny.with_name("damaged.gguf")
    damaged.write_bytes(whole)
    # Damage may go unnoticed (a letter of a token), but must not surface as another error.
    with contextlib.suppress(CheckpointError):
        checkpoint = GgufCheckpoint(damaged)
        for name in checkpoint.names():
            checkpoint.read(name)


def test_versions_that_are_not_known_are_refused(tiny: Path) -> None:
    whole = bytearray(tiny.read_bytes())
    for version, hint in ((1, "version 1"), (9, "version 9"), (3 << 24, "big-endian")):
        whole[4:8] = struct.pack("<I", version)
        tiny.write_bytes(whole)
        with pytest.raises(CheckpointError, match=hint):
            GgufCheckpoint(tiny)


def write_tiny(path: Path, arch: str, config: Mapping[str, Any], **kwargs: Any) -> Path:
    embedding = {"token_embd.weight": np.zeros((8, 64), dtype=np.float32)}
    return write_file(path, arch, config, {**embedding, **kwargs.pop("tensors", {})}, **kwargs)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "mamba", COMMON)
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported.*llama.*qwen3"):
        GgufCheckpoint(path)


def test_experts_in_a_llama_are_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path / "m.gguf", "llama", COMMON, extra=lambda writer: writer.add_expert_count(8)
    )
    with pytest.raises(CheckpointError, match="Mixtral"):
        GgufCheckpoint(path)


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path / "m.gguf",
        "llama",
        COMMON,
        extra=lambda writer: writer.add_uint16("split.count", 3),
    )
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        GgufCheckpoint(path)


def test_an_unknown_block_format_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", COMMON)
    whole = path.read_bytes()
    name = b"token_embd.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8
    for kind, hint in ((9, "Q8_1"), (250, "unknown quantisation type 250")):
        path.write_bytes(whole[:at] + struct.pack("<I", kind) + whole[at + 4 :])
        with pytest.raises(CheckpointError, match=hint):
            GgufCheckpoint(path)


def test_all_unknown_tensors_are_listed_at_once(tmp_path: Path) -> None:
    extra = {f"blk.0.{part}.weight": np.zeros((2, 32)) for part in ("ssm_a", "attn_sinks")}
    path = write_tiny(tmp_path / "m.gguf", "llama", COMMON, tensors=extra)
    with pytest.raises(CheckpointError) as caught:
        GgufCheckpoint(path)
    assert len(caught.value.problems) == 2
    assert "blk.0.ssm_a.weight" in caught.value.problems[0]


def test_all_missing_keys_are_listed_at_once(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError) as caught:
        GgufCheckpoint(tmp_path / "m.gguf")
    text = str(caught.value)
    for key in ("context_length", "attention.head_count", "expert_count", "token_embd.weight"):
        assert key in text
    assert "block_count" not in text


DESCRIPTION: dict[str, Any] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": [2, 2],
    "attention.key_length": 8,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 8,
}


def translated(**changes: Any) -> dict[str, Any]:
    keys = {f"llama.{key}": value for key, value in {**DESCRIPTION, **changes}.items()}
    shapes = {"token_embd.weight": (100, 32)}
    return translate_config({"general.architecture": "llama", **keys}, shapes, None, "m.gguf")


@pytest.mark.parametrize("value", ["x", True, 0, -1, math.nan, math.inf, [], ["x"], [[1]], [1, 2]])
@pytest.mark.parametrize("key", DESCRIPTION)
def test_odd_values_of_the_metadata_are_refused_by_name(key: str, value: Any) -> None:
    assert translated()["num_key_value_heads"] == 2
    with pytest.raises(CheckpointError, match=f"llama.{key}"):
        translated(**{key: value})


@pytest.mark.slow
def test_the_real_model_equals_what_transformers_loads(model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    )
    found = GgufCheckpoint(model_path)
    expected = model.state_dict()
    assert set(found.names()) == set(expected) - {"lm_head.weight"}
    for name in found.names():
        assert torch.equal(found.read(name), expected[name]), name
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "head_dim", "intermediate_size", "vocab_size", "tie_word_embeddings",
                "max_position_embeddings", "attention_bias", "mlp_bias", "hidden_act",
                "bos_token_id", "eos_token_id", "model_type"):  # fmt: skip
        assert found.config[key] == getattr(model.config, key), key
    assert found.config["rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert np.float32(found.config["rms_norm_eps"]) == np.float32(model.config.rms_norm_eps)
