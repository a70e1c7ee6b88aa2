"""Op "draft_block" against the same pass written down plainly, at every level that runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional

from deepinfer_core.checkpoint.quantize import quantize_q8_0
from deepinfer_core.interfaces.kernels import (
    DraftBlockWeights,
    DraftChainWeights,
    DraftLayerWeights,
    DraftPast,
)
from deepinfer_core.ops.reference import OPS
from deepinfer_cpu.draft_block import KINDS, NativeDraftBlock
from deepinfer_cpu.ops import NativeLinear

HIDDEN, WIDE, HEADS, KV, DIM, BLOCK, VOCAB, RANK = 64, 96, 4, 2, 16, 4, 70, 32
EPS, PRECISION = 1e-5, 2e-3


class Plain:
    """A draft model in plain torch, and its weights for the op."""

    def __init__(self, native: Any, *, layers: int = 2, normed: bool = True, biased: bool = True):
        self._generator = torch.Generator().manual_seed(3)
        self._linear = NativeLinear(native)
        self.dense: dict[str, tuple[Tensor, Tensor | None]] = {}
        qkv = (HEADS + 2 * KV) * DIM
        self.weights = DraftBlockWeights(
            context=self.handle("context", HIDDEN, 3 * HIDDEN),
            context_norm=self.floats(HIDDEN),
            layers=tuple(
                DraftLayerWeights(
                    input_norm=self.floats(HIDDEN),
                    middle_norm=self.floats(HIDDEN),
                    head_norms=(self.floats(DIM), self.floats(DIM)) if normed else None,
                    qkv=self.handle(f"qkv{at}", qkv, HIDDEN, biased=biased),
                    keys_values=self.handle(f"pair{at}", 2 * KV * DIM, HIDDEN),
                    output=self.handle(f"output{at}", HIDDEN, HEADS * DIM),
                    gate_up=self.handle(f"gate_up{at}", 2 * WIDE, HIDDEN),
                    down=self.handle(f"down{at}", HIDDEN, WIDE),
                )
                for at in range(layers)
            ),
            final_norm=self.floats(HIDDEN),
            head=self.handle("head", VOCAB, HIDDEN, biased=True),
            mask=self.floats(HIDDEN),
            cos=self.floats(50, DIM // 2),
            sin=self.floats(50, DIM // 2),
            norm_eps=EPS,
            hidden_size=HIDDEN,
            intermediate_size=WIDE,
            num_heads=HEADS,
            num_kv_heads=KV,
            head_dim=DIM,
        )

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def handle(self, name: str, outputs: int, inputs: int, *, biased: bool = False) -> Any:
        weight = quantize_q8_0(self.floats(outputs, inputs) / inputs**0.5)
        bias = self.floats(outputs) if biased else None
        scales = weight.data.view(outputs, -1, 34)[..., :2].contiguous().view(torch.float16)
        numbers = weight.data.view(outputs, -1, 34)[..., 2:].contiguous().view(torch.int8)
        self.dense[name] = (numbers.float() * scales.float()).view(outputs, inputs), bias
        return self._linear.prepare(weight, bias)

    def product(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, *self.dense[name])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, EPS)

    def turned(self, heads: Tensor, norms: Any, which: int, at: Tensor) -> Tensor:
        if norms is not None:
            heads = self.norm(heads, norms[which])
        turned: Tensor = OPS["rope"]().run(heads, self.weights.cos[at], self.weights.sin[at])
        return turned

    def context(self, features: Tensor, at: Tensor) -> list[tuple[Tensor, Tensor]]:
        rows = self.norm(self.product(features, "context"), self.weights.context_norm)
        found = []
        for index, layer in enumerate(self.weights.layers):
            k, v = self.product(rows, f"pair{index}").view(len(at), 2, KV, DIM).unbind(1)
            found.append((self.turned(k, layer.head_norms, 1, at), v))
        return found

    def run(self, anchor: Tensor, position: int, pasts: list[DraftPast]) -> Tensor:
        """One sequence, [BLOCK, VOCAB]."""
        x = torch.cat([anchor.unsqueeze(0), self.weights.mask.expand(BLOCK - 1, -1)])
        at = torch.arange(position, position + BLOCK).clamp(max=49)
        for index, (layer, past) in enumerate(zip(self.weights.layers, pasts, strict=True)):
            heads = self.product(self.norm(x, layer.input_norm), f"qkv{index}")
            q, k, v = heads.view(BLOCK, -1, DIM).split([HEADS, KV, KV], 1)
            q, k = (
                self.turned(part, layer.head_norms, which, at) for which, part in enumerate((q, k))
            )
            rows = []
            for row, unseen in enumerate(past.unseen):
                keys, values = (
                    torch.cat([old.view(-1, KV, DIM)[unseen:], new]).repeat_interleave(
                        HEADS // KV, 1
                    )
                    for old, new in ((past.keys, k), (past.values, v))
                )
                scores = torch.einsum("hd,khd->hk", q[row], keys) / DIM**0.5
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten())
            x = x + self.product(torch.stack(rows), f"output{index}")
            gate, up = self.product(self.norm(x, layer.middle_norm), f"gate_up{index}").chunk(2, -1)
            x = x + self.product(functional.silu(gate) * up, f"down{index}")
        return self.product(self.norm(x, self.weights.final_norm), "head")


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert torch.isfinite(found).all()
    assert (found - wanted).abs().max() <= PRECISION * wanted.abs().max()


@pytest.mark.parametrize("normed", [True, False])
def test_a_block_sees_its_past_and_itself(native: Any, normed: bool) -> None:
    plain = Plain(native, normed=normed, biased=normed)
    op = NativeDraftBlock(native)
    handle = op.prepare(plain.weights)
    assert handle is not None
    lengths = [0, 1, 9, 40]
    pasts = [
        [
            DraftPast(
                keys=plain.floats(length, KV, DIM),
                values=plain.floats(length, KV, DIM),
                unseen=[min(length, row * (length > 5)) for row in range(BLOCK)],
            )
            for length in lengths
        ]
        for _ in plain.weights.layers
    ]
    anchors, positions = plain.floats(len(lengths), HIDDEN), [3, 1, 9, 48]
    wanted = torch.stack(
        [
            plain.run(anchors[at], positions[at], [layer[at] for layer in pasts])
            for at in range(len(lengths))
        ]
    )
    for rows in (1, 3, BLOCK):
        found = op.run(anchors, positions, BLOCK, pasts, rows, handle)
        close(found, wanted[:, :rows])
        for at in range(len(lengths)):  # nothing depends on the neighbours, bit for bit
            one = [[layer[at]] for layer in pasts]
            alone = op.run(anchors[at : at + 1], positions[at : at + 1], BLOCK, one, rows, handle)
            assert torch.equal(alone[0], found[at])


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_context_rows_become_keys_and_values(native: Any, rows: int) -> None:
    plain = Plain(native)
    op = NativeDraftBlock(native)
    at = torch.arange(rows) + 7
    features = plain.floats(rows, 3 * HIDDEN)
    handle = op.prepare(plain.weights)
    assert handle is not None
    found = op.context(features, at, handle)
    for (keys, values), (wanted_keys, wanted_values) in zip(
        found, plain.context(features, at), strict=True
    ):
        close(keys, wanted_keys)
        close(values, wanted_values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sure", [True, False])
def test_greedy_drafts_from_left_to_right(native: Any, kind: str, sure: bool) -> None:
    plain = Plain(native, layers=1)
    parts = {"vanilla": 0, "gated": RANK, "rnn": 3 * RANK}[kind] + 1
    weights = DraftChainWeights(
        kind=kind,
        table=plain.floats(300, RANK),
        inner={
            "vanilla": None,
            "gated": plain.floats(RANK, RANK),
            "rnn": plain.floats(3 * RANK, 2 * RANK) / 8,
        }[kind],
        sure=plain.floats(RANK) if sure else None,
        bias=plain.handle("bias", VOCAB, RANK),
        ids=torch.randperm(300, generator=torch.Generator().manual_seed(1))[:VOCAB],
        says=True,
    )
    rows, anchors = plain.floats(5, 3, VOCAB + parts), torch.tensor([0, 299, 7, 7, 50])
    op = NativeDraftBlock(native)
    tokens, confidence = op.chain(rows, anchors, op.prepare_chain(weights))
    for sequence in range(5):
        previous, state = int(anchors[sequence]), torch.zeros(RANK)
        for place in range(3):
            row, embedded = rows[sequence, place], weights.table[previous]
            out, own = embedded, row[VOCAB:]
            if kind == "gated":
                assert weights.inner is not None
                out = torch.sigmoid(own[:RANK] + weights.inner @ embedded) * embedded
            elif kind == "rnn":
                assert weights.inner is not None
                joint = own[: 3 * RANK] + weights.inner @ torch.cat([state, embedded])
                gate, candidate, last = joint.chunk(3)
                gate = torch.sigmoid(gate)
                state, out = gate * state + (1 - gate) * candidate.tanh(), last.tanh()
            logits = row[:VOCAB] + plain.product(out, "bias")
            previous = int(weights.ids[logits.argmax()])
            assert int(tokens[sequence, place]) == previous
            said = own[-1] + (0.0 if weights.sure is None else weights.sure @ embedded)
            assert float(confidence[sequence, place]) == pytest.approx(float(said), abs=1e-4)


def test_the_first_of_equal_drafts_is_taken(native: Any) -> None:
    plain = Plain(native, layers=1)
    weights = DraftChainWeights(
        kind="vanilla", table=torch.zeros(VOCAB, RANK), inner=None, sure=None,
        bias=plain.handle("bias", VOCAB, RANK), ids=torch.arange(VOCAB), says=False,
    )  # fmt: skip
    op = NativeDraftBlock(native)
    tokens, _ = op.chain(torch.zeros(2, 3, VOCAB), torch.tensor([1, 2]), op.prepare_chain(weights))
    assert tokens.tolist() == [[0] * 3] * 2


def test_what_the_op_cannot_serve_is_left_to_others(native: Any) -> None:
    plain = Plain(native)
    op = NativeDraftBlock(native)
    assert op.prepare(evolve(plain.weights, intermediate_size=24)) is None
    weights = DraftChainWeights(
        kind="vanilla", table=torch.zeros(5, RANK), inner=None, sure=None,
        bias=plain.handle("bias", VOCAB, RANK), ids=torch.arange(VOCAB), says=False,
    )  # fmt: skip
    with pytest.raises(IndexError, match="anchors"):
        op.chain(torch.zeros(1, 3, VOCAB), torch.tensor([5]), op.prepare_chain(weights))
