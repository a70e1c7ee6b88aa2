"""The contract with flash_mla: records, conditions, and a strict stand-in that computes."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from deepinfer_ascend import AscendKernelsConfig, sparse
from deepinfer_ascend.errors import CallError
from deepinfer_ascend.kernels import build
from deepinfer_ascend.sparse import DIM, HEADS, LatentRows, SparseCache
from deepinfer_ascend.testing.flash_mla import library as emulated
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts


def flash_mla_with_kvcache(
    q: Any, k_cache: Any, block_table: None, cache_seqlens: None, head_dim_v: int, schedule: Any,
    *, indices: Any, attn_sink: Any, extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
) -> Any:  # fmt: skip
    """What its documentation says, in float64 over the bytes of the records."""
    assert (block_table, cache_seqlens, head_dim_v) == (None, None, DIM)
    assert schedule.pop() == "fresh"
    out = torch.zeros_like(q)
    denominators = torch.full((q.shape[0], HEADS, q.shape[1]), torch.inf)
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            seen = []
            for records, places in ((k_cache, indices), (extra_k_cache, extra_indices_in_kvcache)):
                if records is not None:
                    flat = records.view(-1, records.shape[-1])
                    taken = flat[places[b, s][places[b, s] >= 0].long()]
                    unpack = sparse.unpack_main if flat.shape[-1] == 528 else sparse.unpack_extra
                    seen.append(unpack(taken))
            keys = torch.cat(seen).double()
            if not len(keys):
                continue
            scores = q[b, s].double() @ keys.t()
            with_sink = torch.cat([scores, attn_sink.double()[:, None]], -1)
            out[b, s] = (with_sink.softmax(-1)[:, :-1] @ keys).to(q.dtype)
            denominators[b, :, s] = scores.logsumexp(-1)
    return out, denominators


@pytest.fixture(autouse=True)
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flash_mla")
    module.flash_mla_with_kvcache = flash_mla_with_kvcache  # type: ignore[attr-defined]
    module.get_mla_metadata = lambda: (["fresh"], None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", module)


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed))


def world() -> tuple[torch.Tensor, SparseCache, SparseCache]:
    q = (vectors(2, 3, HEADS) * DIM**-0.5).bfloat16()
    main = sparse.pack_main(vectors(4, 16, seed=1)).unsqueeze(2)
    extra = sparse.pack_extra(vectors(2, 16, seed=2)).unsqueeze(2)
    chosen = torch.randint(0, 64, (2, 3, 8), generator=torch.Generator().manual_seed(3)).int()
    few = torch.randint(0, 32, (2, 3, 4), generator=torch.Generator().manual_seed(4)).int()
    few[0, 1, 2:] = -1
    return q, SparseCache(records=main, indices=chosen), SparseCache(records=extra, indices=few)


@pytest.mark.parametrize(
    ("pack", "unpack", "size", "error"),
    [
        (sparse.pack_main, sparse.unpack_main, 528, 2**-4),
        (sparse.pack_extra, sparse.unpack_extra, 288, 0.25),
    ],
)
def test_records_hold_the_vectors(pack: Any, unpack: Any, size: int, error: float) -> None:
    x = vectors(50) * torch.logspace(-1, 2, 50)[:, None]
    records = pack(x)
    assert records.shape == (50, size)
    found = unpack(records)
    assert float((found - x).abs().amax(-1).div(x.abs().amax(-1)).max()) < error
    if size == 528:
        assert torch.equal(unpack(pack(found)), found)


def test_it_agrees_with_attention_over_what_was_stored() -> None:
    q, main, extra = world()
    sinks = torch.linspace(-1, 1, HEADS)
    out, _ = sparse.attend(q, main, sinks=sinks, extra=extra)
    stored = sparse.unpack_main(main.records.view(-1, 528)).double()
    more = sparse.unpack_extra(extra.records.view(-1, 288)).double()
    places = extra.indices[0, 1][:2].long()
    keys = torch.cat([stored[main.indices[0, 1].long()], more[places]])
    scores = q[0, 1].double() @ keys.t()
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.double().exp()[:, None])
    assert float((out[0, 1].double() - weights @ keys).abs().max()) < 0.02


def test_a_query_that_sees_nothing_gives_zero_and_an_endless_denominator() -> None:
    q, main, _ = world()
    main.indices[1, 2] = -1
    out, denominators = sparse.attend(q, main, sinks=torch.zeros(HEADS))
    assert not out[1, 2].any()
    assert bool((denominators[1, :, 2] == torch.inf).all())


def test_what_it_does_not_take_is_refused() -> None:
    q, main, extra = world()
    sinks = torch.zeros(HEADS)
    for wrong in (q[:, :, :32], q.float(), q[..., :256]):
        with pytest.raises(CallError, match="bfloat16"):
            sparse.attend(wrong, main, sinks=sinks)
    for bad in (
        evolve(main, records=extra.records),
        evolve(main, records=main.records.float()),
        evolve(main, indices=main.indices.long()),
        evolve(main, indices=main.indices[:1]),
    ):
        with pytest.raises(CallError, match="k_cache"):
            sparse.attend(q, bad, sinks=sinks)
    with pytest.raises(CallError, match="attn_sink"):
        sparse.attend(q, main, sinks=sinks.bfloat16())


def test_an_index_out_of_bounds_is_found() -> None:
    _, main, _ = world()
    sparse.check_indices(main)
    for index in (64, -2):
        main.indices[0, 0, 0] = index
        with pytest.raises(CallError, match="beyond"):
            sparse.check_indices(main)


def test_without_flash_mla_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flash_mla")
    assert "not installed" in str(sparse.why_not())


# ------------------------------------------------------------------------- op "latent_attention"


def latent(rows: int = 5) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """DeepSeek's attention, what rows see in two memories full of NaN, queries and sinks."""
    attention = pytest.importorskip("deepinfer_deepseek.attention")
    generator = torch.Generator().manual_seed(0)
    seen = []
    for count, width in ((40, 8), (30, 70)):
        memory = torch.full((count, DIM), float("nan"), dtype=torch.bfloat16)
        slots = torch.randint(0, count, (rows, width), generator=generator)
        hidden = torch.rand(rows, width, generator=generator) < 0.4
        hidden[2] = True
        used = slots[~hidden].unique()
        memory[used] = torch.randn(len(used), DIM, generator=generator).bfloat16()
        seen.append(attention.Seen(vectors=memory, slots=slots, hidden=hidden))
    q = torch.randn(rows, HEADS, DIM, generator=generator).bfloat16()
    return attention, seen, q, torch.linspace(-1, 3, HEADS)


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_attend_as_deepseeks_models_do(parts: int) -> None:
    """With sinks that matter, memory that must not be read, and a row that sees nothing."""
    attention, seen, q, sinks = latent()
    expected = attention.attend(q, seen[:parts], scale=DIM**-0.5, sinks=sinks)
    found = LatentRows(emulated()).run(q, seen[:parts], scale=DIM**-0.5, sinks=sinks)
    assert found.dtype == torch.bfloat16
    assert float((found - expected).abs().max()) < 0.01
    assert not found[2].any()
    without = attention.attend(q, seen[:parts], scale=DIM**-0.5, sinks=sinks - 100)
    assert float((found - without).abs().max()) > 0.1


def test_rows_that_see_nothing_at_all_ask_nobody() -> None:
    _, seen, q, sinks = latent()
    none = [evolve(part, hidden=torch.ones_like(part.hidden)) for part in seen]
    assert not LatentRows(None).run(q, none, scale=1.0, sinks=sinks).any()


def test_each_vector_is_sent_once_and_lists_fill_blocks() -> None:
    _, seen, _, _ = latent()
    vectors, indices = sparse.joined(seen)
    wanted = sum(len(part.slots[~part.hidden].unique()) for part in seen)
    assert vectors.shape == (wanted, DIM)
    assert indices.shape == (5, 128)
    assert int(indices.max()) == wanted - 1
    assert int((indices == -1).sum()) == 5 * 50 + sum(int(part.hidden.sum()) for part in seen)


def test_what_the_library_does_not_take_is_refused() -> None:
    _, _, q, sinks = latent()
    vectors, indices = torch.zeros(9, DIM).bfloat16(), torch.zeros(5, 64, dtype=torch.int32)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("q is", {"q": q[:, :32]}),
        ("q is", {"q": q.half()}),
        ("kv is torch.float32", {"vectors": vectors.float()}),
        ("kv is", {"vectors": vectors[:, :256]}),
        ("indices are", {"indices": indices.long()}),
        ("indices are", {"indices": indices[:4]}),
        ("not of 64", {"indices": indices[:, :60]}),
        ("attn_sink", {"sinks": sinks.bfloat16()}),
    ]
    right: dict[str, Any] = {
        "q": q,
        "vectors": vectors,
        "indices": indices,
        "sinks": sinks,
        "scale": 1.0,
    }
    sparse.attend_vectors(emulated(), **right)
    for message, changed in wrong:
        with pytest.raises(CallError, match=message):
            sparse.attend_vectors(emulated(), **{**right, **changed})


def test_other_versions_and_builds_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "flash_mla")
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "flash_mla"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    info = tmp_path / "deepinfer_flashmla-1.dist-info"
    info.mkdir()
    for version, says in (("2.0.0", "written for 1.x"), ("1.0.0", "without its Ascend build")):
        lines = f"Metadata-Version: 2.1\nName: deepinfer-flashmla\nVersion: {version}\n"
        (info / "METADATA").write_text(lines)
        assert says in str(sparse.why_not())
    (package / "npu.cpython-311-aarch64-linux-gnu.so").touch()
    assert sparse.why_not() is None


def latent_offers(**facts: Any) -> dict[str, str | None]:
    """What providers of the op object to."""
    found = OpFacts(**{"device_type": "npu", "dtype": "bfloat16", "attention": "latent", **facts})
    offers = build(AscendKernelsConfig(), KernelsContext(device_type="npu")).providers()
    return {p.name: p.why_not(found) for p in offers if p.op == "latent_attention"}


def test_the_fallback_is_listed_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "why_not", lambda: None)
    shapes = {"heads": HEADS, "head_dim": DIM}
    assert latent_offers(shapes=shapes) == {"flash_mla_sparse_fwd": None, "torch": None}
    refused = "flash_mla_sparse_fwd"
    few = latent_offers(shapes={"heads": 4, "head_dim": 16})
    page = (Path(__file__).parents[3] / "docs" / "hardware.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `latent_attention`"))
    assert all(f"`{name}`" in row.split(" | ")[2] for name in few)
    assert few[refused] == "64 heads of 512 only, not 4 of 16"
    assert few["torch"] is None
    assert "not float32" in str(latent_offers(dtype="float32", shapes=shapes)[refused])
    for other in (latent_offers(attention="ascend"), latent_offers(device_type="cpu")):
        assert all(other.values())
