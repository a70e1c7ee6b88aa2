"""Pieces by themselves: what rows see, what is ranked, how experts and tables are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from deepinfer_core.errors import CheckpointError, CompositionError
from deepinfer_core.interfaces.attention import AttentionContext
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.text.tokenizer import Tokenizer
from deepinfer_deepseek.attention import LatentAttention, LatentPlan, Seen, attend
from deepinfer_deepseek.config import read_config
from deepinfer_deepseek.engram import check_ids, check_rows, compressed_ids, hashes_of
from deepinfer_deepseek.indexer import candidates, scores, top_entries
from deepinfer_deepseek.testing.tiny import harness, tiny_config, tokens_of

WINDOW = 8


def seen_positions(model: Any, batch: Any, name: str) -> list[list[int]]:
    """Positions that each row of a batch sees in a window group, by where their pages are."""
    index = [group.name for group in model.spec.groups].index(name)
    spec, tables = model.spec.groups[index], batch.groups[index].block_tables
    attention = model.executor._attention
    plan: LatentPlan = attention.plan(batch, index, torch.device("cpu"))
    assert plan.slots is not None
    assert plan.hidden is not None
    owners = np.repeat(np.arange(batch.num_sequences), np.diff(batch.query_starts))
    found = []
    for owner, slots, hidden in zip(owners, plan.slots, plan.hidden, strict=True):
        pages = tables[owner].tolist()
        places = [divmod(slot, spec.page_size) for slot in slots[~hidden].tolist()]
        found.append([pages.index(page) * spec.page_size + offset for page, offset in places])
    return found


def test_windows_count_positions_not_rows(tiny: Path) -> None:
    """In a later chunk, of a sequence that is not the first of its batch."""
    model = harness(tiny)
    for sequence, length in ((1, 3), (2, 13)):
        model.open(sequence)
        model.step({sequence: tokens_of(length)})
    batch = model.batch({1: [5], 2: tokens_of(6)})
    wanted = [[0, 1, 2, 3]]
    wanted += [list(range(at - WINDOW + 1, at + 1)) for at in range(13, 19)]
    assert seen_positions(model, batch, "encoder.window") == wanted
    assert seen_positions(model, batch, "decoder.window") == wanted


def test_a_cut_hides_what_lies_below_it(tiny: Path) -> None:
    """The decoder's rows begin at the cut, where the encoder's see on."""
    model = harness(tiny, decoder="mask", decoder_keep=14)
    model.open(1, 33)
    model.step({1: tokens_of(17)}, rows={1: []})
    batch = model.batch({1: tokens_of(16)})
    cut = 33 - 14
    wanted = [list(range(max(cut, at - WINDOW + 1), at + 1)) for at in range(17, 33)]
    assert seen_positions(model, batch, "decoder.window") == wanted
    assert seen_positions(model, batch, "encoder.window")[0] == list(range(10, 18))


def test_other_groups_are_refused() -> None:
    group = CacheGroupSpec(name="full", layers=(0,), num_kv_heads=1, key_dim=16, value_dim=16)
    context = AttentionContext(
        groups=(group,), device_type="cpu", dtype="float32", num_query_heads=4, batch_invariant=True
    )
    with pytest.raises(CompositionError, match="not the cache groups full"):
        LatentAttention(context)


def test_what_is_hidden_is_never_read() -> None:
    vectors = torch.full((4, 16), torch.nan, dtype=torch.float64)
    vectors[2] = 1.0
    seen = Seen(
        vectors=vectors,
        slots=torch.tensor([[0, 2, 3], [-5, 99, 1]]),
        hidden=torch.tensor([[True, False, True], [True, True, True]]),
    )
    q = torch.ones(2, 4, 16, dtype=torch.float64)
    out = attend(q, [seen], scale=0.25, sinks=torch.full((4,), 4.0, dtype=torch.float64))
    assert torch.allclose(out[0], torch.full_like(out[0], 0.5))  # half of the mass is the sink's
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_score_does_not_depend_on_how_many_there_are(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, weights = torch.randn(7, 5, 24, generator=generator), torch.randn(7, 5, generator=generator)
    keys = torch.randn(200, 24, generator=generator)
    found = scores(q, weights, keys[:count])
    assert torch.equal(found, scores(q, weights, keys)[:, :count])
    assert torch.equal(scores(q[3:4], weights[3:4], keys[:count]), found[3:4])
    wanted = torch.einsum("nh,nhj->nj", weights, torch.einsum("nhd,jd->nhj", q, keys).relu())
    assert torch.allclose(found, wanted[:, :count], atol=1e-4)


def test_ties_go_to_the_lower_entry_whatever_follows() -> None:
    """Scores of exactly zero are common, and later entries must not push earlier ones out."""
    found = torch.tensor([[0.0, 2.0, 0.0, 0.0, -1.0]])
    assert top_entries(found, 3).tolist() == [[0, 1, 2]]
    assert top_entries(torch.cat([found, torch.zeros(1, 90)], 1), 3).tolist() == [[0, 1, 2]]


def test_entries_that_must_not_be_chosen() -> None:
    found = torch.tensor([[1.0, -torch.inf, 0.5], [-torch.inf] * 3])
    assert top_entries(found, 6).tolist() == [[0, 2, -1], [-1, -1, -1]]


def test_the_newest_block_is_always_a_candidate() -> None:
    found = torch.tensor([[9.0, 8.0, 1.0, 2.0, 5.0, 4.0, -3.0, -torch.inf]])
    kept = candidates(found, torch.tensor([7]), block=2, most=2)
    assert kept.tolist() == [[True, True, False, False, False, False, True, True]]


def test_blocks_without_a_visible_entry_are_none() -> None:
    found = torch.tensor([[1.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf]])
    kept = candidates(found, torch.tensor([1]), block=2, most=3)
    assert kept.tolist() == [[True, True, False, False, False]]


def test_primes_of_the_public_tables(real: dict[str, Any]) -> None:
    """Twenty-four primes a layer sum up to the rows that the configuration says."""
    engram = read_config(real).engram
    assert engram is not None
    check_rows(engram)
    hashes = hashes_of(engram)
    assert [len(hashes[layer].primes) for layer in engram.layers] == [24, 24]
    assert len({*hashes[1].primes.tolist(), *hashes[14].primes.tolist()}) == 48


class Words:
    """A tokenizer of these texts."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return self._texts[ids[0]]

    def token(self, token_id: int) -> str:
        return f"raw {token_id}"


def numbers_of(*texts: str) -> list[int]:
    found: list[int] = compressed_ids(cast("Tokenizer", Words(*texts)), len(texts)).tolist()
    return found


@pytest.mark.parametrize(
    "alike",
    [
        ["Éa", "ea", " EA", "ea \n", "e\u0301a"],  # case, accents and blanks around
        ["ﬁ", "fi", "Ｆｉ"],
        ["a b", "a\n\t b", "A  B"],
        [" ", "\n", "   ", "\t\r"],  # one space, which stays
    ],
    ids=str,
)
def test_texts_that_count_as_one(alike: list[str]) -> None:
    assert numbers_of("x", *alike, "y") == [0, *[1] * len(alike), 2]


def test_texts_that_stay_apart() -> None:
    """Among them bytes that are no text, and one that normalises to nothing."""
    different = ["", " ", "a", "ab", "a b", "\ufffd", "a\ufffd", "\u0301", "<｜end｜>"]
    assert numbers_of(*different) == list(range(len(different)))


def test_another_tokenizer_is_refused() -> None:
    engram = read_config(tiny_config()).engram
    assert engram is not None
    with pytest.raises(CheckpointError, match="it is not the tokenizer of this model"):
        check_ids(engram, np.array([0, 1, 2]))


def test_tables_of_another_size_are_refused() -> None:
    config = tiny_config()
    config["engram_num_embeddings"][1] += 1
    engram = read_config(config).engram
    assert engram is not None
    with pytest.raises(CheckpointError) as caught:
        check_rows(engram)
    assert caught.value.problems[0].startswith("engram_num_embeddings of layer 4: 553, but its")
