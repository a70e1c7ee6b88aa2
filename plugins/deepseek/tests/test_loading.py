"""Experts stay packed until they are used; tables stay on disk."""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deepinfer_core.errors import CheckpointError
from deepinfer_core.interfaces.checkpoint import Checkpoint
from deepinfer_core.interfaces.model import BuildRequest
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_deepseek.attention import build as build_attention
from deepinfer_deepseek.checkpoint.loading import matrix, row_table, stacked
from deepinfer_deepseek.checkpoint.matrices import FP4
from deepinfer_deepseek.checkpoint.reader import DeepSeekFormat
from deepinfer_deepseek.model import V41Family
from deepinfer_deepseek.options import V41Options
from deepinfer_deepseek.quant.numbers import E2M1, unpack_nibbles
from deepinfer_deepseek.testing.checkpoints import packed_config, plain_weights, write_checkpoint

EXPERT, TABLE = "layers.3.ffn.experts.2.w2.weight", "layers.4.engram.embed.weight"


def request_of(checkpoint: Checkpoint, dtype: str = "float32") -> BuildRequest:
    """As much of a request as loading looks at."""
    found = SimpleNamespace(
        read=checkpoint.read,
        read_packed=checkpoint.read_packed,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return cast("BuildRequest", found)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_experts_and_rows_are_the_plain_numbers(tmp_path: Path, plain: bool, dtype: str) -> None:
    request = request_of(DeepSeekFormat().open(write_checkpoint(tmp_path, plain=plain)), dtype)
    expected = plain_weights(packed_config())
    expert, table = matrix(request, EXPERT), row_table(request, TABLE)
    assert expert.dense().equal(expected[EXPERT].to(getattr(torch, dtype)))
    assert expert.shape == (64, 32)
    assert expert.num_bytes == (64 * 32 * 4 if plain else 64 * 32 // 2 + 64)
    ids = torch.tensor([[0, 551], [17, 17]])
    assert table.shape == (552, 32)
    assert table.rows(ids).equal(expected[TABLE][ids].to(getattr(torch, dtype)))
    assert table.rows(ids[:0]).shape == (0, 2, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_all_numbers_of_all_blocks_expand_to_the_bit(dtype: torch.dtype) -> None:
    """Every byte beside every scale but NaN, also where results are subnormal or overflow."""
    data = torch.arange(256, dtype=torch.uint8).repeat(255, 2)
    codes = torch.arange(255, dtype=torch.uint8).unsqueeze(1).repeat(1, 32)
    numbers = E2M1.decode(unpack_nibbles(data))
    wanted = (numbers * 2.0 ** (codes[:, :1].double() - 127)).to(torch.float32)
    out = torch.empty_like(wanted, dtype=dtype)
    FP4.expand_into(out, data, codes.view(torch.float8_e8m0fnu))
    assert out.equal(wanted.to(dtype))
    assert FP4.expand(data, codes.view(torch.float8_e8m0fnu)).equal(wanted)


def test_an_expert_is_expanded_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows choose it, and not at all if none does."""
    folder = write_checkpoint(tmp_path, packed_config(n_routed_experts=16, num_experts_per_tok=1))
    model = ModelHarness(
        DeepSeekFormat().open(folder),
        family=V41Family(V41Options()),
        attention=("latent", build_attention),
    )
    expanded: list[int] = []

    def counted(matrices: Any) -> torch.Tensor:
        expanded.append(len(matrices))
        return stacked(matrices)

    monkeypatch.setattr("deepinfer_deepseek.experts.stacked", counted)
    model.open(1)
    model.step({1: [5]})
    assert len(expanded) == 10, "one expert in each layer"
    expanded.clear()
    model.step({1: list(range(200))})
    assert 10 < len(expanded) <= 10 * 16


def test_what_was_loaded_outlives_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = DeepSeekFormat().open(write_checkpoint(tmp_path))
    expert, table = (
        make(request_of(checkpoint), name) for make, name in ((matrix, EXPERT), (row_table, TABLE))
    )
    checkpoint.close()
    assert expert.dense().equal(plain_weights(packed_config())[EXPERT])  # type: ignore[union-attr]
    assert table.rows(torch.tensor([3])).equal(plain_weights(packed_config())[TABLE][3:4])  # type: ignore[union-attr]


def test_rows_that_share_scales_are_refused(tmp_path: Path) -> None:
    request = request_of(DeepSeekFormat().open(write_checkpoint(tmp_path)))
    with pytest.raises(CheckpointError, match="fp8_32x32 cannot be read one by one"):
        row_table(request, "layers.0.attn.wq_a.weight")


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files and the unit of ru_maxrss")
def test_a_table_larger_than_memory_is_read_row_by_row(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = 2 * memory // 264
    header: dict[str, Any] = {
        "engram.embed.weight": {
            "dtype": "F8_E4M3",
            "shape": [rows, 256],
            "data_offsets": [0, rows * 256],
        },
        "engram.embed.scale": {
            "dtype": "F8_E8M0",
            "shape": [rows, 8],
            "data_offsets": [rows * 256, rows * 264],
        },
    }
    raw = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        start = file.tell()
        file.truncate(start + rows * 264)
        file.seek(start + (rows - 2) * 256)
        file.write(bytes([0x38, 0xB8]) * 128)  # 1, -1, 1, ...
        file.seek(start + rows * 256 + (rows - 2) * 8)
        file.write(bytes([128] * 8))
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v41"}')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    table = row_table(request_of(DeepSeekFormat().open(tmp_path)), "engram.embed.weight")
    found = table.rows(torch.tensor([0, rows - 2, rows // 2]))
    assert found[1].tolist() == [2.0, -2.0] * 128
    assert not found[[0, 2]].any()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**17, "KiB: 128 MiB at most, of a file twice as large as the memory"
