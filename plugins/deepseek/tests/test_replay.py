"""What a replay touches, costs and gets wrong, beyond what test_engine.py asks of results.

The tiny model has six encoder layers with a window of 8, so 42 replayed rows rebuild it exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_core.batch import Batch
from deepinfer_core.engine.engine import Engine
from deepinfer_core.testing.cache_harness import cache_context
from deepinfer_deepseek.model import V41Family
from deepinfer_deepseek.options import V41Options
from deepinfer_deepseek.testing.engines import Runner, bits
from deepinfer_deepseek.testing.slow import SlowV41
from deepinfer_deepseek.testing.tiny import slow, tokens_of

prefix = pytest.importorskip("deepinfer_prefix")
PrefixConfig = pytest.importorskip("deepinfer_prefix.config").PrefixConfig

WINDOW, KEEP, ROWS, EXACT_ROWS = 8, 20, 12, 42
LASTING = ("entries.r1", "keys.r1", "entries.r2", "keys.r2")
PASSING = ("encoder.window", "decoder.window", "partial")

Make = Callable[..., Runner]


@pytest.fixture
def make(tiny: Path) -> Iterator[Make]:
    engines: list[Engine] = []

    def runner(rows: int = ROWS, cache: Any = None, drafting: Any = None, **engine: Any) -> Runner:
        bounded = PrefixConfig(replay="bounded", replay_tokens=rows)
        plugins, config = [prefix], {"cache": cache or bounded}
        if drafting is not None:
            plugins.append(pytest.importorskip("deepinfer_dspark"))
            config |= {"drafter": drafting, "budget": "fixed"}
        component = V41Options(decoder_keep=KEEP)
        made = Runner(tiny, plugins, engine, model_component=component, **config)
        engines.append(made.engine)
        return made

    yield runner
    for engine in engines:
        engine.close()


def recorded(runner: Runner) -> list[Batch]:
    """The batches that an engine runs from now on."""
    executor = runner.executor
    batches: list[Batch] = []
    launch = executor.launch

    def listening(batch: Batch, *rest: Any) -> Any:
        batches.append(batch)
        return launch(batch, *rest)

    executor.launch = listening
    return batches


def group_index(runner: Runner, name: str) -> int:
    return [group.name for group in runner.engine.spec.groups].index(name)


def test_pages_of_a_hit_are_shared_and_stay_in_place(make: Make) -> None:
    """While rows over them are replayed, too; at the end nobody holds them."""
    runner = make(max_batch_tokens=5)
    batches = recorded(runner)
    runner.run(tokens_of(96), max_tokens=1)
    lasting = [group_index(runner, name) for name in LASTING]
    pages = {at: batches[-1].groups[at].block_tables[0, :12].tolist() for at in lasting}
    before = len(batches)
    assert runner.run([*tokens_of(96), *tokens_of(30, 1)]).cached_tokens == 96
    for batch in batches[before:]:
        for at in lasting:
            assert batch.groups[at].block_tables[0, :12].tolist() == pages[at]
    usage = runner.engine._parts.cache.usage()
    assert not any(group.used for group in usage)


def test_replayed_rows_take_their_share_of_a_step(make: Make) -> None:
    """Steps to the first token are those of the suffix and the rows before it."""
    for batch, length in ((5, 96), (5, 200), (9, 200)):
        runner = make(max_batch_tokens=batch)
        runner.run(tokens_of(length, length), max_tokens=1)
        batches = recorded(runner)
        found = runner.run([*tokens_of(length, length), *tokens_of(10, 1)], max_tokens=1)
        assert found.cached_tokens == length
        assert [part.num_tokens for part in batches[:-1]] == [batch] * (len(batches) - 1)
        assert sum(part.num_tokens for part in batches) == 10 + ROWS


@pytest.mark.parametrize("length", [1024, 5000, 65536])
def test_the_cost_of_a_hit_is_the_same_for_any_prefix(real: dict[str, Any], length: int) -> None:
    """Of the published model, by its cache groups: 140 rows."""
    groups = V41Family(V41Options()).describe(real, page_size=128, kv_dtype="bfloat16").groups
    cache_of = pytest.importorskip("deepinfer_prefix.cache").PrefixCache
    pages = [2 * group.pages_for(length + 128) for group in groups]
    cache = cache_of(PrefixConfig(), cache_context(groups, pages))
    tokens = [at % 1000 for at in range(length)]
    cache.open(1, tokens)
    assert cache.reserve(1, length)
    cache.commit(1, length, tokens)
    cache.release(1)
    hit = cache.open(2, [*tokens, *range(10)])
    assert hit.length == length
    assert hit.length - hit.compute_from == 140


def poison(runner: Runner, *names: str) -> None:
    """Fill all memory of some groups with NaN."""
    storages = runner.executor._storages
    for name in names:
        storage = storages[group_index(runner, name)]
        for tensor in (*storage._keys, *storage._values):
            tensor.fill_(float("nan"))


def test_nothing_that_a_hit_does_not_bring_is_read(make: Make) -> None:
    """Windows below the replay's start, stale pages, cut rows of the decoder, unwritten entries."""
    prompt, found = [*tokens_of(96), *tokens_of(31, 1)], []
    for poisoned in ((), PASSING):
        runner = make()
        runner.run(tokens_of(90, 7), max_tokens=20)
        runner.run(tokens_of(96), max_tokens=1)
        poison(runner, *poisoned)
        result = runner.run(prompt, max_tokens=20)
        assert result.cached_tokens == 96
        found.append(bits(result))
    assert found[0] == found[1]
    assert all(math.isfinite(each.logprob) for _, scores in found[1] for each in scores)


@pytest.mark.parametrize("more", [1, 5, 12, 13, 200])
def test_replay_and_truncation_together(make: Make, more: int) -> None:
    """The suffix is shorter than what the decoder keeps, about as long, or much longer."""
    hit = 60
    prompt = [*tokens_of(hit), *tokens_of(more, 1)]
    found = []
    for batch in (7, 64):
        runner = make(max_batch_tokens=batch)
        runner.run(tokens_of(hit))
        result = runner.run(prompt, max_tokens=1, logprobs=5)
        assert (result.cached_tokens, result.exact) == (hit, False)
        found.append(bits(result))
    assert found[0] == found[1]
    if more > 13:
        # So far from the cut that what was approximated is felt by entries alone.
        return
    logits = slow(keep=KEEP).logits(prompt, start=hit - ROWS, hit=hit)[-1]
    ((_, (reported,)),) = found[0]
    wanted = logits[reported.token_id] - np.log(np.exp(logits).sum())
    assert reported.logprob == pytest.approx(float(wanted), abs=1e-3)


@pytest.mark.parametrize(("more", "cut"), [(5, 48), (13, 53)])
def test_windows_begin_where_the_replay_and_the_cut_do(make: Make, more: int, cut: int) -> None:
    """The decoder's with the rows that it keeps, but none below the replay; in every chunk."""
    runner, hit = make(max_batch_tokens=7), 60
    runner.run(tokens_of(hit), max_tokens=1)
    batches = recorded(runner)
    assert runner.run([*tokens_of(hit), *tokens_of(more, 1)]).cached_tokens == hit
    for name, start in (("encoder.window", hit - ROWS), ("decoder.window", cut)):
        at = group_index(runner, name)
        assert {*(int(batch.groups[at].visible_from[0]) for batch in batches)} == {start}


@pytest.mark.parametrize("hit", [0, 96])
def test_decoding_sees_whole_windows_from_the_first_token_on(make: Make, hit: int) -> None:
    """After a truncated prompt, and after a replayed prefix."""
    runner = make()
    if hit:
        runner.run(tokens_of(hit), max_tokens=1)
    batches = recorded(runner)
    result = runner.run([*tokens_of(hit), *tokens_of(41 if not hit else 9, 1)], max_tokens=6)
    assert result.cached_tokens == hit
    decoding = [batch for batch in batches if batch.num_tokens == 1]
    assert len(decoding) >= 5
    attention = runner.executor._attention
    import torch

    for batch in decoding:
        for name in ("encoder.window", "decoder.window"):
            plan = attention.plan(batch, group_index(runner, name), torch.device("cpu"))
            assert (~plan.hidden).sum() == WINDOW, (name, int(batch.positions[0]))


def test_hashes_of_replayed_rows_know_the_ids_before_them(make: Make) -> None:
    """Rows of n-gram tables at the replay's start are those of a run from the beginning."""
    prompt = [*tokens_of(96), *tokens_of(9, 1)]
    found: list[dict[int, list[Any]]] = []
    for runner in (make(), make(cache="pages")):
        if not found:
            runner.run(tokens_of(96), max_tokens=1)
        hasher = runner.executor._model._hasher
        seen: dict[int, list[Any]] = {}
        rows_of = hasher.rows

        def listening(
            ids: Any, rows: Any, *, inner: Any = rows_of, into: dict[int, list[Any]] = seen
        ) -> Any:
            made = inner(ids, rows)
            for row, position in enumerate(rows.positions.tolist()):
                into[position] = [table[row].tolist() for table in made.values()]
            return made

        hasher.rows = listening
        runner.run(prompt, max_tokens=1)
        found.append(seen)
    replayed, cold = found
    assert min(replayed) == 96 - ROWS
    assert all(rows == cold[position] for position, rows in replayed.items())


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_abort_while_rows_are_replayed_leaves_nothing(make: Make, steps: int) -> None:
    """No page stays in use, and nothing half written is found by others."""
    prompt = [*tokens_of(96), *tokens_of(30, 1)]
    runner, undisturbed = make(max_batch_tokens=5), make(max_batch_tokens=5)
    for each in (runner, undisturbed):
        each.run(tokens_of(96), max_tokens=1)
    name = runner.submit(prompt)
    for _ in range(steps):
        runner.engine.step()
    runner.engine.abort(name)
    while runner.engine.has_work:
        runner.engine.step()
    usage = runner.engine._parts.cache.usage()
    assert not any(group.used for group in usage)
    # Only what was computed to the end of a page may be found.
    assert runner.run(prompt, max_tokens=1).cached_tokens in (96, (96 - ROWS + 5 * steps) // 8 * 8)
    other = [*tokens_of(96), *tokens_of(30, 2)]
    found = runner.run(other)
    assert (found.cached_tokens, found.exact) == (96, False)
    assert bits(found) == bits(undisturbed.run(other))


def test_rejected_drafts_leave_windows_as_they_were(make: Make) -> None:
    """After a truncated prompt; compared are all vectors that a next token would see."""
    dspark = pytest.importorskip("deepinfer_dspark")
    prompt = [*tokens_of(20, 1), *tokens_of(20, 1), *tokens_of(20, 1)]
    found: list[Any] = []
    for drafting in (None, dspark.NgramConfig(longest=2, shortest=1)):
        runner = make(cache="pages", drafting=drafting)
        batches = recorded(runner)
        result = runner.run(prompt, max_tokens=40)
        assert drafting is None or result.drafted > result.accepted + 5
        end, kept = len(prompt) + 39, []
        for name in ("encoder.window", "decoder.window"):
            at = group_index(runner, name)
            spec = runner.engine.spec.groups[at]
            storage = runner.executor._storages[at]
            table = batches[-1].groups[at].block_tables[0]
            places = [divmod(position, spec.page_size) for position in range(end - WINDOW, end)]
            slots = [int(table[page]) * spec.page_size + offset for page, offset in places]
            kept += [storage.keys(layer)[slots].tolist() for layer in spec.layers]
        found.append((bits(result), kept))
    assert found[0] == found[1]


def test_more_rows_are_better_and_a_cut_past_is_much_worse() -> None:
    """On average over prompts, where choices among entries make no jumps.

    The slow model answers; that the engine says the same is asked of it above.
    """
    hit, more = 60, KEEP
    choices = {"index_topk": 128, "candidate_topk_blocks": 128}
    rows = (8, 21, 35, EXACT_ROWS)
    errors = dict.fromkeys(rows, 0.0)
    replayed = cut = 0.0
    for seed in range(3):
        model, tokens = slow(keep=KEEP, **choices), tokens_of(hit + more, seed)
        cold = model._run(tokens, 0, {}, 0)
        exact = last_logits(model, tokens, 0, {})
        for count in rows:
            found = last_logits(model, tokens, hit - count, cold, hit)
            errors[count] += float(np.abs(found - exact).max())
            if count == 8:
                replayed += divergence(exact, found)
        cut += divergence(exact, last_logits(model, tokens[hit - 8 :], 0, {}))
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert errors[EXACT_ROWS] < 1e-12 < errors[35]
    assert replayed < cut / 20


def last_logits(
    model: SlowV41, tokens: list[int], start: int, cold: dict[int, Any], hit: int = 0
) -> Any:
    out = np.full((len(tokens), model.c["vocab_size"]), np.nan)
    model._run(tokens, start, cold, hit, len(tokens) - KEEP, out)
    return out[-1]


def divergence(exact: Any, found: Any) -> float:
    """Kullback-Leibler, in nats."""
    p, q = (logits - np.log(np.exp(logits).sum()) for logits in (exact, found))
    return float((np.exp(p) * (p - q)).sum())
