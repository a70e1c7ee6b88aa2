"""Checkpoints on disk: written and read back, whole and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer_core.checkpoint.coverage import check_coverage
from deepinfer_core.checkpoint.tensors import Kept
from deepinfer_core.errors import CheckpointError
from deepinfer_core.testing.contracts import CheckpointContract
from deepinfer_deepseek.checkpoint.matrices import MatrixFormat
from deepinfer_deepseek.checkpoint.reader import DeepSeekCheckpoint, DeepSeekFormat
from deepinfer_deepseek.config import read_config
from deepinfer_deepseek.testing.checkpoints import (
    DRAFTS,
    packed_config,
    plain_weights,
    write_checkpoint,
)
from deepinfer_deepseek.weights import FLOATS, PRECISE, ignored_weights, weight_specs

FILE = "model.safetensors"
TABLE = packed_config(**DRAFTS)
CONFIG = read_config(TABLE)


class TestDeepSeek(CheckpointContract):
    component = "deepseek"

    def write(
        self, directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> Path:
        return super().write(directory, tensors, {**config, "model_type": "deepseek_v3"})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("v41"), TABLE)


@pytest.fixture
def damaged(written: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copy a checkpoint, changing tensors; None removes one."""

    def change(changes: Mapping[str, Tensor | None]) -> Path:
        tensors = {**load_file(written / FILE), **changes}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, tmp_path / FILE)
        (tmp_path / "config.json").write_text((written / "config.json").read_text())
        return tmp_path

    return change


def opened(path: Path) -> DeepSeekCheckpoint:
    assert DeepSeekFormat().why_not(path) is None
    return DeepSeekFormat().open(path)


def problems_of(path: Path) -> tuple[str, ...]:
    checkpoint = opened(path)
    with pytest.raises(CheckpointError) as caught:
        check_coverage(checkpoint, weight_specs(CONFIG), ignored_weights(CONFIG))
    return caught.value.problems


def test_a_written_checkpoint_holds_what_a_model_expects(written: Path) -> None:
    checkpoint = opened(written)
    specs = weight_specs(CONFIG)
    check_coverage(checkpoint, specs, ignored_weights(CONFIG))
    assert not [name for name in checkpoint.names() if name.endswith(".scale")]
    for spec in specs:
        info = checkpoint.info(spec.name)
        assert info.format == spec.formats[0]
        if spec.stored_bytes:
            assert info.num_bytes == spec.stored_bytes
    assert sum(checkpoint.info(name).num_bytes for name in checkpoint.names()) == (
        checkpoint.total_bytes
    )


def test_the_files_have_the_published_dtypes(written: Path) -> None:
    tensors = load_file(written / FILE)
    found = {
        name: (tensors[name].dtype, tuple(tensors[name].shape))
        for name in (
            "embed.weight",
            "layers.0.attn.wq_a.weight",
            "layers.0.attn.wq_a.scale",
            "layers.3.ffn.experts.1.w2.weight",
            "layers.3.ffn.experts.1.w2.scale",
            "layers.1.engram.embed.weight",
            "layers.1.engram.embed.scale",
            "layers.2.attn.attn_sink",
        )
    }
    assert list(found.values()) == [
        (torch.bfloat16, (272, 64)),
        (torch.float8_e4m3fn, (32, 64)),
        (torch.float8_e8m0fnu, (1, 2)),
        (torch.int8, (64, 16)),
        (torch.float8_e8m0fnu, (64, 1)),
        (torch.float8_e4m3fn, (384, 32)),
        (torch.float8_e8m0fnu, (384, 1)),
        (torch.float32, (4,)),
    ]


def test_read_gives_the_numbers_that_packed_ones_stand_for(written: Path) -> None:
    checkpoint = opened(written)
    for name, expected in plain_weights(TABLE).items():
        assert checkpoint.read(name).equal(expected), name


def test_the_plain_twin_holds_the_same_numbers(written: Path, tmp_path: Path) -> None:
    plain, packed = opened(write_checkpoint(tmp_path, TABLE, plain=True)), opened(written)
    assert plain.names() == packed.names()
    assert "quantization_config" not in plain.config
    check_coverage(plain, weight_specs(read_config(plain.config)))
    for name in plain.names():
        assert plain.read_packed(name) is None
        assert plain.read(name).equal(packed.read(name))


def test_the_same_seed_writes_the_same_bytes(written: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    write_checkpoint(again, TABLE)
    write_checkpoint(other, TABLE, seed=1)
    assert (again / FILE).read_bytes() == (written / FILE).read_bytes()
    assert (other / FILE).read_bytes() != (written / FILE).read_bytes()


def test_shards_hold_what_one_file_holds(written: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TABLE, max_shard_bytes=200_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded, whole = opened(tmp_path), opened(written)
    assert sharded.names() == whole.names()
    for name in whole.names():
        assert sharded.read(name).equal(whole.read(name))


def test_a_prefix_of_names_is_dropped(written: Path, tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in load_file(written / FILE).items()}
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_text((written / "config.json").read_text())
    prefixed = opened(tmp_path)
    assert prefixed.names() == opened(written).names()
    check_coverage(prefixed, weight_specs(CONFIG))
    save_file({**tensors, "norm.weight": torch.ones(64)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"norm\.weight is there with and without"):
        DeepSeekFormat().open(tmp_path)


def test_older_checkpoints_multiply_by_scale_inv(tmp_path: Path) -> None:
    square = MatrixFormat.named("fp8_128x128")
    assert square is not None
    matrix = torch.randn(130, 300, generator=torch.Generator().manual_seed(0))
    data, scales = square.quantize(matrix)
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file(
        {name: data.view(torch.float8_e4m3fn), f"{name}_scale_inv": scales.float() * 0.75},
        tmp_path / FILE,
    )
    config = {"model_type": "deepseek_v3", "quantization_config": {"weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = opened(tmp_path)
    assert checkpoint.names() == (name,)
    assert checkpoint.info(name).format == "fp8_128x128"
    assert checkpoint.read(name).equal(square.expand(data, scales.float() * 0.75))


def test_everything_that_does_not_fit_comes_in_one_error(damaged: Callable[..., Path]) -> None:
    path = damaged(
        {
            "norm.weight": None,
            "layers.0.attn.wkv.scale": None,
            "layers.0.attn.wo_b.scale": torch.ones(3, 1).to(torch.float8_e8m0fnu),
            "layers.2.ffn.experts.0.w1.scale": torch.ones(1, 2).to(torch.float8_e8m0fnu),
            "layers.3.ffn.gate.weight": torch.zeros(5, 64).bfloat16(),
            "layers.3.attn.attn_sink": torch.zeros(4, dtype=torch.int64),
            "layers.3.ffn.experts.4.w1.weight": torch.zeros(32, 64).bfloat16(),
            "vision.norm.weight": torch.ones(4),
            "mtp.1.embed.weight": torch.ones(4),
        }
    )
    floats, precise = (" or ".join(formats) for formats in (FLOATS, PRECISE))
    fp8, fp4 = f"fp8_32x32 or {floats}", f"fp4_1x32 or {floats}"
    expert = "layers.2.ffn.experts.0.w1"
    assert set(problems_of(path)) == {
        "missing: norm.weight [64]",
        f"misshaped: {expert}.weight is [32, 32], the model expects [32, 64]",
        "misshaped: layers.3.ffn.gate.weight is [5, 64], the model expects [4, 64]",
        f"wrong format: layers.0.attn.wkv.weight is float8_e4m3fn, the model expects {fp8}",
        f"wrong format: layers.0.attn.wo_b.weight is float8_e4m3fn, the model expects {fp8}",
        f"wrong format: {expert}.weight is int8, the model expects {fp4}",
        f"wrong format: layers.3.attn.attn_sink is int64, the model expects {precise}",
        "unexpected: layers.0.attn.wo_b.scale [3, 1]",
        f"unexpected: {expert}.scale [1, 2]",
        "unexpected: layers.3.ffn.experts.4.w1.weight [32, 64]",
    }


def test_truncated_files_are_refused(written: Path, tmp_path: Path) -> None:
    whole = (written / FILE).read_bytes()
    (tmp_path / "config.json").write_text((written / "config.json").read_text())
    for share in (0.0, 0.3, 0.99):
        (tmp_path / FILE).write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: (corrupt or )?truncated"):
            opened(tmp_path)


@pytest.mark.parametrize("block", [[32], "32", [0, 32], [32.0, 32]])
def test_a_block_size_that_makes_no_sense_is_refused(
    damaged: Callable[..., Path], block: Any
) -> None:
    path = damaged({})
    config = {**TABLE, "quantization_config": {"weight_block_size": block}}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="weight_block_size: expected two sizes"):
        DeepSeekFormat().open(path)


def test_other_models_are_left_to_other_readers(damaged: Callable[..., Path]) -> None:
    path = damaged({})
    (path / "config.json").write_text('{"model_type": "llama"}')
    assert "'llama' is not one of DeepSeek's" in (DeepSeekFormat().why_not(path) or "")
    (path / "config.json").write_text("[")
    assert "no readable config.json" in (DeepSeekFormat().why_not(path) or "")


def test_without_a_drafter_its_tensors_are_ignored(written: Path) -> None:
    config = read_config(packed_config())
    assert config.draft is None
    check_coverage(opened(written), weight_specs(config), ignored_weights(config))
    with pytest.raises(CheckpointError, match=r"unexpected: mtp\.0"):
        check_coverage(opened(written), weight_specs(config))


def test_the_published_sizes(real: dict[str, Any]) -> None:
    """552 billion parameters and 196.6 in tables; about 475 GiB."""
    specs = [spec for spec in weight_specs(read_config(real)) if not spec.optional]
    size = 0
    parameters = dict.fromkeys(Kept, 0)
    for spec in specs:
        numbers = 1
        for extent in spec.shape:
            numbers *= extent
        if not spec.name.startswith("mtp."):
            parameters[spec.kept] += numbers
        size += spec.stored_bytes or numbers * (4 if spec.formats[0] == "float32" else 2)
    assert parameters[Kept.MAPPED] == pytest.approx(196.6e9, rel=1e-3)
    assert parameters[Kept.PACKED] + parameters[Kept.DENSE] == pytest.approx(552e9, rel=2e-3)
    assert size / 2**30 == pytest.approx(475, rel=0.01)
    by_name = {spec.name: spec for spec in specs}
    for name, shape in {
        "layers.7.hc_ffn_fn": (24, 20480),
        "layers.7.attn.wo_a.weight": (8192, 4096),
        "layers.36.attn.indexer.wq_b.weight": (4096, 1280),
        "layers.20.attn.indexer.wk.weight": (128, 512),
        "layers.39.ffn.experts.383.w2.weight": (5120, 2304),
        "layers.14.engram.wkv.weight": (25600, 6144),
        "mtp.0.main_proj.weight": (5120, 15360),
        "mtp.2.confidence_head.proj.weight": (1, 5376),
    }.items():
        assert by_name[name].shape == shape
    assert "layers.20.attn.compressor.wkv.weight" in by_name
    assert "layers.20.attn.compressor.wgate.weight" not in by_name
