"""Training and drafting compute the same thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_core.builtin.torch_kernels import build as torch_kernels
from deepinfer_core.interfaces.drafter import CommittedRows, DraftRequest
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts
from deepinfer_core.ops.table import OpTable, choose
from deepinfer_dspark.calibration import OnlineCalibration
from deepinfer_dspark.checkpoint import DraftCheckpoint
from deepinfer_dspark.context import ContextCache
from deepinfer_dspark.drafter import MOST_WAITING, DsparkDrafter
from deepinfer_dspark.network import DraftNetwork
from deepinfer_dspark.runner import DraftRunner, past
from deepinfer_dspark.shape import parameter_sizes
from deepinfer_dspark.training.blocks import Shared, run_blocks
from deepinfer_dspark.training.data import Text

Maker = Callable[..., DraftCheckpoint]


def parts(
    checkpoint: DraftCheckpoint, seed: int = 1, length: int = 40
) -> tuple[DraftNetwork, Shared, Text]:
    network = DraftNetwork(checkpoint.shape)
    network.load_state_dict(checkpoint.network_state())
    shared = Shared.of(
        checkpoint.tensors["embed_tokens.weight"],
        checkpoint.tensors["lm_head.weight"],
        checkpoint.draft_vocab_ids,
    )
    generator = torch.Generator().manual_seed(seed)
    hidden = checkpoint.shape.decoder.hidden_size
    text = Text(
        token_ids=torch.randint(0, 64, (length,), generator=generator),
        start=3,
        features=torch.randn(length, 3 * hidden, generator=generator),
        hidden=torch.randn(length, hidden, generator=generator),
        log_norm=torch.full((length,), 5.0),
    )
    return network, shared, text


def hidden(
    runner: DraftRunner, anchors: torch.Tensor, positions: list[int], caches: list[ContextCache]
) -> torch.Tensor:
    pasts = [
        [
            past(cache, layer, at, runner.block_size, window)
            for cache, at in zip(caches, positions, strict=True)
        ]
        for layer, window in enumerate(runner._shape.windows)
    ]
    return runner.hidden_by_ops(anchors, positions, pasts)


WINDOWED = {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 9}


@pytest.mark.parametrize("changes", [{}, WINDOWED, {"markov_head_type": "rnn"}])
def test_drafting_sees_what_training_saw(make_checkpoint: Maker, changes: dict[str, Any]) -> None:
    network, shared, text = parts(make_checkpoint(**changes))
    anchors = torch.tensor([1, 5, 17, 33])
    expected = run_blocks(network, shared, text, anchors).hidden
    mask = shared.embedding[network.shape.mask_token_id]
    runner = DraftRunner(
        network, shared.head, mask, network.shape.block_size, shared.draft_vocab_ids
    )
    caches = []
    for anchor in anchors.tolist():
        cache = ContextCache(runner.window)
        for position in range(anchor):  # one at a time, with rejected drafts in between
            positions = np.arange(position, min(position + 3, anchor))
            cache.append(positions, runner.context(text.features[positions].float(), positions))
        caches.append(cache)
    found = hidden(runner, shared.embedding[text.token_ids[anchors]], anchors.tolist(), caches)
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-4)


def test_old_context_is_dropped_and_nothing_changes(make_checkpoint: Maker) -> None:
    network, shared, text = parts(make_checkpoint(**WINDOWED), length=500)
    mask = shared.embedding[network.shape.mask_token_id]
    runner = DraftRunner(
        network, shared.head, mask, network.shape.block_size, shared.draft_vocab_ids
    )
    cache = ContextCache(runner.window)
    for position in range(490):
        positions = np.array([position])
        cache.append(positions, runner.context(text.features[positions].float(), positions))
    assert cache.length < 300
    anchor = torch.tensor([490])
    expected = run_blocks(network, shared, text, anchor).hidden
    found = hidden(runner, shared.embedding[text.token_ids[anchor]], [490], [cache])
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "smollm3"])
def test_the_layout_is_what_the_network_has(make_checkpoint: Maker, kind: str, family: str) -> None:
    changes: dict[str, Any] = {"attention_bias": True} if family == "llama" else {}
    shape = make_checkpoint(markov_head_type=kind, model_type=family, **changes).shape
    found = {name: tuple(p.shape) for name, p in DraftNetwork(shape).named_parameters()}
    assert parameter_sizes(shape) == found


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("changes", [{"model_type": "qwen3"}, {"model_type": "llama"}, WINDOWED])
def test_one_call_drafts_what_many_do(
    make_checkpoint: Maker, kind: str, changes: dict[str, Any]
) -> None:
    """Greedy blocks by op "draft_block" and by single ops of the same kernels."""
    kernels = pytest.importorskip("deepinfer_cpu.kernels")
    plain = torch_kernels(None, KernelsContext(device_type="cpu")).providers()
    facts = OpFacts(device_type="cpu", dtype="float32")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    checkpoint = make_checkpoint(markov_head_type=kind, **(sizes | changes))
    network, shared, text = parts(checkpoint)
    tables = [
        OpTable(choose([("cpu", offers), ("torch", plain)], facts), facts)
        for every in [kernels.CpuKernels().providers()]
        for offers in (every, [p for p in every if p.op != "draft_block"])
    ]
    drafts = []
    for ops in tables:
        runner = DraftRunner(
            network,
            shared.head,
            shared.embedding[network.shape.mask_token_id],
            network.shape.block_size,
            shared.draft_vocab_ids,
            ops,
        )
        drafter = DsparkDrafter(
            runner,
            embed=shared.embedding.__getitem__,
            draft_vocab_ids=shared.draft_vocab_ids,
            vocab_size=checkpoint.shape.decoder.vocab_size,
            calibration=OnlineCalibration(network.shape.block_size, (), every=0),
            replay_tokens=0,
        )
        requests = []
        for sequence, length in enumerate([5, 17, 33]):
            cache, positions = ContextCache(runner.window), np.arange(length)
            cache.append(positions, runner.context(text.features[:length].float(), positions))
            drafter.adopt(sequence, cache)
            requests.append(
                DraftRequest(
                    sequence_id=sequence, token_ids=text.token_ids[: length + 1].tolist(),
                    temperature=0.0, seed=0, limit=network.shape.block_size - (sequence == 1),
                )
            )  # fmt: skip
        drafts.append(drafter.propose(requests))
    for fused, single in zip(*drafts, strict=True):
        assert fused.token_ids == single.token_ids
        assert len(fused.token_ids) >= network.shape.block_size - 1
        assert fused.confidences == pytest.approx(single.confidences, abs=1e-3)


def test_rows_may_wait_for_the_draft_that_needs_them(make_checkpoint: Maker) -> None:
    """Observed one by one, with rejected ones in between, or all at once."""
    checkpoint = make_checkpoint()
    network, shared, text = parts(checkpoint, length=MOST_WAITING + 60)
    runner = DraftRunner(
        network,
        shared.head,
        shared.embedding[network.shape.mask_token_id],
        network.shape.block_size,
        shared.draft_vocab_ids,
    )

    def observed(sizes: list[int], beyond: int) -> Any:
        drafter = DsparkDrafter(
            runner,
            embed=shared.embedding.__getitem__,
            draft_vocab_ids=shared.draft_vocab_ids,
            vocab_size=checkpoint.shape.decoder.vocab_size,
            calibration=OnlineCalibration(network.shape.block_size, (), every=0),
            replay_tokens=0,
        )
        at = 0
        for size in sizes:
            rows = CommittedRows(
                sequence_ids=(1,),
                query_starts=np.array([0, size + beyond], np.int32),
                positions=np.arange(at, at + size + beyond, dtype=np.int32),
                token_ids=text.token_ids[at : at + size + beyond].numpy().astype(np.int32),
            )
            taps = text.features[at : at + size + beyond].chunk(3, -1)
            drafter.observe(rows, dict(zip(runner.taps, taps, strict=True)))
            at += size
            drafter.commit(1, at)
        assert (1 in drafter._contexts) == (at >= MOST_WAITING)
        drafter.fork(1, 2)
        return drafter.propose(
            [
                DraftRequest(
                    sequence_id=sequence, token_ids=text.token_ids[: at + 1].tolist(),
                    temperature=0.0, seed=0, limit=network.shape.block_size,
                )
                for sequence in (1, 2)
            ]
        )  # fmt: skip

    for length in (40, MOST_WAITING + 30):
        wanted = observed([length], 0)
        assert wanted[0].token_ids == wanted[1].token_ids
        for sizes, beyond in (([1] * length, 0), ([2] * (length // 2), 2)):
            found = observed(sizes, beyond)
            for one, other in zip(found, wanted, strict=True):
                assert one.token_ids == other.token_ids
                assert one.confidences == pytest.approx(other.confidences, abs=1e-4)
