"""Run by test_sanitizers.py in a process of its own: every entry point of one library, no torch.

usage: sanitized_cases.py LIBRARY
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from deepinfer_cpu import structs
from deepinfer_cpu.library import declared

BLOCKS = {structs.Format.Q4_0: 18, structs.Format.Q4_1: 20, structs.Format.Q8_0: 34}
RANDOM = np.random.default_rng(0)
KEPT: list[Any] = []


def at(array: np.ndarray[Any, Any]) -> int:
    """Address of an array, which is kept."""
    KEPT.append(array)
    return int(array.ctypes.data)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.standard_normal(shape).astype(np.float32)


def weight(
    native: Any, kind: structs.Format, n: int, k: int, *, wild: bool = False, bits: int = 16
) -> Any:
    """A packed weight; wild ones have scales of any bits."""
    rows: np.ndarray[Any, Any] = floats(n, k)
    if kind == structs.Format.BF16:
        rows = np.ascontiguousarray(rows.view(np.uint16)[:, 1::2])
    if kind in BLOCKS:
        rows = RANDOM.integers(0, 256, (n, k // 32, BLOCKS[kind]), dtype=np.uint8)
        if not wild:
            rows[..., :4] = np.array([0.02, 0.01], np.float16).view(np.uint8)
    linear = structs.Linear(n=n, k=k, format=kind, bits=bits, bias=at(floats(n)))
    panels = np.empty(native.di_packed_bytes(ctypes.byref(linear)), np.uint8)
    linear.panels = at(panels)
    native.di_pack(ctypes.byref(linear), at(rows))
    KEPT.append(linear)
    return linear


def products(native: Any) -> None:
    narrow = [(kind, 8) for kind in (structs.Format.Q4_0, structs.Format.Q4_1)]
    for kind, bits in (*((kind, 16) for kind in structs.Format), *narrow):
        for n, k in ((1, 32), (16, 64), (37, 96), (130, 160)):
            for wild in (False, True):
                linear = weight(native, kind, n, k, wild=wild, bits=bits)
                for rows in (1, 2, 3, 5, 66):
                    x, out = floats(rows, k), np.empty((rows, n), np.float32)
                    native.di_linear(ctypes.byref(linear), at(x), k, rows, at(out), n)
                ids, out = np.arange(n, dtype=np.int64), np.empty((n, k), np.float32)
                native.di_embedding(ctypes.byref(linear), at(ids), n, at(out))
        KEPT.clear()


def experts(native: Any, kind: structs.Format) -> None:
    count, hidden, inner, chosen = 5, 64, 96, 2
    matrices = [
        [weight(native, kind, n, k) for _ in range(count)]
        for n, k in ((2 * inner, hidden), (hidden, inner))
    ]
    gate_up, down = (
        (ctypes.c_void_p * count)(*map(ctypes.addressof, linears)) for linears in matrices
    )
    layer = structs.Experts(
        gate_up=ctypes.addressof(gate_up), down=ctypes.addressof(down), count=count,
        hidden=hidden, intermediate=inner, alpha=1.7, limit=1.0, offset=1.0,
    )  # fmt: skip
    for rows in (0, 1, 70, 513):
        ids, out = RANDOM.integers(0, count, (rows, chosen)), np.empty((rows, hidden), np.float32)
        wrong = native.di_experts(
            ctypes.byref(layer), at(floats(rows, hidden)), hidden, at(ids),
            at(floats(rows, chosen)), rows, chosen, at(out),
        )  # fmt: skip
        assert wrong == -1
        assert np.isfinite(out).all()
    KEPT.clear()


def row_ops(native: Any) -> None:
    for rows, size in ((1, 1), (3, 17), (40, 640)):
        x, delta, scale = floats(rows, 2 * size), floats(rows, size), floats(size)
        out = np.empty((rows, size), np.float32)
        native.di_rms_norm(at(x), 2 * size, at(scale), 1e-5, rows, size, at(out))
        native.di_add_rms_norm(
            at(x), 2 * size, at(delta), size, at(scale), 1e-5, rows, size, at(out)
        )
        native.di_silu_mul(at(x), 2 * size, rows, size, at(out))
        angles, turned = floats(rows, size), np.empty((rows, 2 * size), np.float32)
        native.di_rope(
            at(x), 2 * size, 2 * size, at(angles), at(angles), rows, 1, 2 * size, size, at(turned)
        )


def draws(native: Any) -> None:
    """Each filter, for steep and flat rows, and for rows that ban all but a few tokens."""
    table = 2.0 ** (40 - np.arange(43 * 256) / 256)
    knobs: tuple[dict[str, float], ...] = (
        {}, {"temperature": 0.01}, {"temperature": 90.0}, {"top_k": 3}, {"top_k": 10**9},
        {"top_p": 0.9}, {"top_p": 1e-9}, {"min_p": 1.0}, {"min_p": 1e-4, "top_p": 0.99},
    )  # fmt: skip
    params = (structs.DrawRow * len(knobs))(
        *(structs.DrawRow(**{"temperature": 1.0, "top_p": 1.0, **each}) for each in knobs)
    )
    for vocab in (1, 5, 16, 333):
        for scale in (0.0, 1.0, 1e30):
            logits, out = scale * floats(len(knobs), vocab), np.empty(len(knobs), np.int64)
            if scale == 1.0:
                logits[:, 1:300] = -np.inf
            logits = logits.astype(np.float32)
            native.di_draw(at(logits), vocab, len(knobs), vocab, params, at(table), at(out))
            assert ((out >= 0) & (out < vocab)).all()


def decoder(native: Any, kind: structs.Format) -> None:
    """Two layers over pages of 16 tokens: a prompt in two chunks beside a decoding sequence."""
    hidden, heads, kv, dim, wide, size, pages = 64, 4, 2, 16, 96, 16, 8
    attention = [
        structs.AttentionLayer(
            keys=at(floats(pages, kv, dim, size)), values=at(floats(pages, kv, size, dim)),
            scale=0.25, kv_type=0, page_size=size, num_query_heads=heads, num_kv_heads=kv,
            key_dim=dim, value_dim=dim, window=window,
        )
        for window in (0, 7)
    ]  # fmt: skip
    matrices = [
        [
            weight(native, kind, n, k)
            for n, k in ((dim * (heads + 2 * kv), hidden), (hidden, heads * dim),
                         (2 * wide, hidden), (hidden, wide))
        ]
        for _ in attention
    ]  # fmt: skip
    layers = (structs.DecoderLayer * 2)(
        *(
            structs.DecoderLayer(
                input_norm=at(floats(hidden)), middle_norm=at(floats(hidden)),
                q_norm=at(floats(dim)), k_norm=at(floats(dim)),
                qkv=ctypes.addressof(qkv), output=ctypes.addressof(output),
                gate_up=ctypes.addressof(gate_up), down=ctypes.addressof(down),
                attention=ctypes.addressof(layer), use_rope=1,
            )
            for layer, (qkv, output, gate_up, down) in zip(attention, matrices, strict=True)
        )
    )  # fmt: skip
    model = structs.Decoder(
        layers=ctypes.addressof(layers),
        embedding=ctypes.addressof(weight(native, kind, 50, hidden)),
        final_norm=at(floats(hidden)), cos=at(floats(64, dim // 2)), sin=at(floats(64, dim // 2)),
        num_layers=2, hidden=hidden, num_heads=heads, num_kv_heads=kv, head_dim=dim,
        intermediate=wide, half=dim // 2, eps=1e-5,
    )  # fmt: skip
    tables = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
    for starts, positions in (
        ([0, 5, 6], [0, 1, 2, 3, 4, 20]),
        ([0, 30, 31], [*range(5, 35), 21]),
        ([0, 1, 2], [35, 22]),
    ):
        step(native, model, tables, np.array(starts, np.int32), np.array(positions, np.int32), size)


def step(
    native: Any,
    model: structs.Decoder,
    tables: np.ndarray[Any, Any],
    starts: np.ndarray[Any, Any],
    positions: np.ndarray[Any, Any],
    size: int,
) -> None:
    rows = len(positions)
    owners = np.repeat(np.arange(2), np.diff(starts))
    slots = tables[owners, positions // size].astype(np.int64) * size + positions % size
    plan = structs.AttentionPlan(
        positions=at(positions), query_starts=at(starts), block_tables=at(tables),
        visible_from=at(np.zeros(2, np.int32)), write_slots=at(slots), num_tokens=rows,
        num_sequences=2, max_pages=tables.shape[1],
    )  # fmt: skip
    wanted = (starts[1:] - 1).astype(np.int32)
    for tapped in (False, True):
        taps = (ctypes.c_void_p * 3)(*(at(floats(rows, 64)) if tapped else None for _ in range(3)))
        plans = (ctypes.c_void_p * 1)(ctypes.addressof(plan))
        out = np.full((2, 64), np.nan, np.float32)
        one = structs.Step(
            token_ids=at(RANDOM.integers(0, 50, rows)), positions=at(positions),
            plans=ctypes.addressof(plans), wanted=at(wanted), taps=ctypes.addressof(taps),
            out=at(out), rows=rows, num_wanted=2,
        )  # fmt: skip
        native.di_decoder(ctypes.byref(model), ctypes.byref(one))
        assert np.isfinite(out).all()


def drafts(native: Any, kind: structs.Format) -> None:
    """A draft block of one layer for three sequences, its context, and its sequential part."""
    hidden, heads, kv, dim, wide, block, vocab, rank = 64, 4, 2, 16, 96, 3, 37, 32
    qkv, pair, output, gate_up, down, context, head, bias = (
        weight(native, kind, n, k)
        for n, k in ((dim * (heads + 2 * kv), hidden), (2 * kv * dim, hidden),
                     (hidden, heads * dim), (2 * wide, hidden), (hidden, wide),
                     (hidden, 2 * hidden), (vocab + rank + 1, hidden), (vocab, rank))
    )  # fmt: skip
    layers = (structs.DecoderLayer * 1)(
        structs.DecoderLayer(
            input_norm=at(floats(hidden)), middle_norm=at(floats(hidden)),
            qkv=ctypes.addressof(qkv), output=ctypes.addressof(output),
            gate_up=ctypes.addressof(gate_up), down=ctypes.addressof(down), use_rope=1,
        )
    )  # fmt: skip
    pairs = (ctypes.c_void_p * 1)(ctypes.addressof(pair))
    model = structs.DraftBlock(
        decoder=structs.Decoder(
            layers=ctypes.addressof(layers), final_norm=at(floats(hidden)),
            cos=at(floats(64, dim // 2)), sin=at(floats(64, dim // 2)), num_layers=1,
            hidden=hidden, num_heads=heads, num_kv_heads=kv, head_dim=dim, intermediate=wide,
            half=dim // 2, eps=1e-5,
        ),
        context=ctypes.addressof(context), context_norm=at(floats(hidden)),
        keys_values=ctypes.addressof(pairs), head=ctypes.addressof(head),
    )  # fmt: skip
    for rows in (1, 2, 19):
        keys = (ctypes.c_void_p * 1)(at(floats(rows, kv, dim)))
        values = (ctypes.c_void_p * 1)(at(floats(rows, kv, dim)))
        step = structs.DraftContext(
            features=at(floats(rows, 2 * hidden)), positions=at(np.arange(rows, dtype=np.int32)),
            keys=ctypes.addressof(keys), values=ctypes.addressof(values), rows=rows,
        )  # fmt: skip
        native.di_draft_context(ctypes.byref(model), ctypes.byref(step))
    lengths = (0, 1, 20)
    past = (structs.DraftPast * 3)(
        *(structs.DraftPast(at(floats(n, kv, dim)), at(floats(n, kv, dim)), n) for n in lengths)
    )
    unseen = np.array([[0] * 3, [0, 1, 1], [0, 1, 2]], np.int32)
    for wanted in (1, block):
        out = np.full((3, wanted, vocab + rank + 1), np.nan, np.float32)
        native.di_draft_block(
            ctypes.byref(model),
            ctypes.byref(
                structs.DraftStep(
                    anchors=at(floats(3, hidden)), mask=at(floats(hidden)),
                    positions=at(np.arange(3 * block, dtype=np.int32)),
                    past=ctypes.addressof(past), unseen=at(unseen), out=at(out), num_sequences=3,
                    block=block, wanted=wanted,
                )
            ),
        )  # fmt: skip
        assert np.isfinite(out).all()
        chain = structs.DraftChain(
            table=at(floats(50, rank)), inner=at(floats(rank, rank)), sure=at(floats(rank)),
            bias=ctypes.addressof(bias), ids=at(RANDOM.permutation(50)[:vocab].astype(np.int64)),
            rank=rank, kind=1, says=1,
        )  # fmt: skip
        tokens, said = np.full((3, wanted), -1), np.full((3, wanted), np.nan, np.float32)
        native.di_draft_chain(
            ctypes.byref(chain),
            ctypes.byref(
                structs.DraftChainStep(
                    rows=at(out), anchors=at(np.array([0, 7, 49])), tokens=at(tokens),
                    confidence=at(said), num_sequences=3, wanted=wanted, stride=out.shape[2],
                )
            ),
        )  # fmt: skip
        assert ((tokens >= 0) & (tokens < 50)).all()
        assert np.isfinite(said).all()


def main(path: str) -> None:
    native = declared(ctypes.CDLL(path))
    for threads in (1, 2, 3):
        native.di_set_threads(threads)
        products(native)
        row_ops(native)
        draws(native)
        for kind in (structs.Format.Q4_1, structs.Format.Q8_0, structs.Format.F32):
            decoder(native, kind)
            experts(native, kind)
            drafts(native, kind)
    native.di_set_threads(1)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(sys.argv[1])
