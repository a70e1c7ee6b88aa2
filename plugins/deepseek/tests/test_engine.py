"""Whole engines on a tiny model: replay on hits, truncation, preemption, refusals.

The tiny model has six encoder layers with a window of 8, so 42 replayed rows rebuild it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.config import Choice
from deepinfer_core.engine.engine import Engine
from deepinfer_core.errors import CompositionError, RequestError
from deepinfer_deepseek.options import V41Options
from deepinfer_deepseek.testing.engines import Runner, bits
from deepinfer_deepseek.testing.tiny import slow, tokens_of, write_tiny

prefix = pytest.importorskip("deepinfer_prefix")
PrefixConfig = pytest.importorskip("deepinfer_prefix.config").PrefixConfig

EXACT_ROWS = 42
KEEP = 20


Make = Callable[..., Runner]


@pytest.fixture
def make(tiny: Path) -> Iterator[Make]:
    engines: list[Engine] = []

    def runner(
        cache: Any = "prefix",
        model: Path = tiny,
        options: Any = None,
        drafter: str = "none",
        **engine: Any,
    ) -> Runner:
        plugins, config = [prefix], {"cache": cache, "drafter": drafter}
        if drafter != "none":
            plugins.append(pytest.importorskip("deepinfer_dspark"))
            config["budget"] = "fixed"
        component = V41Options(decoder_keep=KEEP) if options is None else options
        made = Runner(model, plugins, engine, model_component=component, **config)
        engines.append(made.engine)
        return made

    yield runner
    for engine in engines:
        engine.close()


def bounded(rows: int) -> Any:
    return PrefixConfig(replay="bounded", replay_tokens=rows)


def test_it_generates_what_the_slow_model_says(make: Make) -> None:
    prompt = tokens_of(37, 4)
    result = make().run(prompt, max_tokens=5)
    tokens, model = list(prompt), slow(keep=KEEP)
    for token in result.outputs[0].token_ids:
        assert model.logits(tokens, num_prompt=len(prompt))[-1].argmax() == token
        tokens.append(token)


@pytest.mark.parametrize("batch", [5, 64])
@pytest.mark.parametrize("decoder", ["off", "mask", "compact"])
def test_enough_replayed_rows_give_the_same_bits(make: Make, batch: int, decoder: str) -> None:
    """All layers are rebuilt without truncation, the encoder's with it."""
    options = V41Options(decoder=decoder, decoder_keep=KEEP)
    cold = make("pages", options=options)
    warm = make(PrefixConfig(replay="exact"), options=options, max_batch_tokens=batch)
    warm.run(tokens_of(150))
    for length, more in ((150, 30), (144, 5), (131, 9)):
        prompt = [*tokens_of(length), *tokens_of(more, more)]
        found = warm.run(prompt)
        assert found.exact
        assert found.cached_tokens > 60
        # The decoder's last rows must all be computed.
        assert decoder == "off" or found.cached_tokens <= len(prompt) - KEEP
        assert bits(found) == bits(cold.run(prompt))


def test_one_row_too_few_is_noticed(make: Make) -> None:
    prompt = [*tokens_of(100), *tokens_of(KEEP, 1)]
    expected = bits(make("pages").run(prompt))
    for rows, exact in ((EXACT_ROWS, True), (EXACT_ROWS - 1, False)):
        runner = make(bounded(rows))
        runner.run(tokens_of(100))
        found = runner.run(prompt)
        assert found.cached_tokens == 100
        assert found.exact is exact
        assert (bits(found) == expected) is exact


def test_snapshots_of_the_encoder_are_exact(make: Make) -> None:
    prompt = [*tokens_of(96), *tokens_of(KEEP + 3, 1)]
    expected = bits(make("pages").run(prompt))
    runner = make(PrefixConfig(replay="snapshot"))
    runner.run(tokens_of(96))
    before = runner.computed()
    found = runner.run(prompt, max_tokens=1)
    assert (found.cached_tokens, found.exact) == (96, True)
    assert runner.computed() - before == KEEP + 3
    assert bits(runner.run(prompt)) == expected


def test_a_bounded_replay_is_that_of_the_slow_model(make: Make) -> None:
    rows, hit = 12, 60
    for more in (1, 5, 33):
        runner = make(bounded(rows))
        runner.run(tokens_of(hit))
        prompt = [*tokens_of(hit), *tokens_of(more, 1)]
        found = runner.run(prompt, max_tokens=1, logprobs=5)
        assert (found.cached_tokens, found.exact) == (hit, False)
        logits = slow(keep=KEEP).logits(prompt, start=hit - rows, hit=hit)[-1]
        wanted = logits - _log_sum(logits)
        reported = found.outputs[0].logprobs
        assert reported is not None
        assert reported[0].logprob == pytest.approx(wanted[reported[0].token_id], abs=1e-3)


def _log_sum(logits: Any) -> float:
    import numpy as np

    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max())


def test_the_cost_of_a_hit_does_not_grow_with_it(make: Make) -> None:
    runner = make(kv_pages=600)
    for length in (60, 160, 400):
        prompt = tokens_of(length, length)
        runner.run(prompt, max_tokens=1)
        before = runner.computed()
        found = runner.run([*prompt, *tokens_of(10, 1)], max_tokens=1)
        assert found.cached_tokens == length
        assert runner.computed() - before == 10 + 8 + 12


def test_what_was_found_is_never_written(make: Make) -> None:
    runner = make(bounded(12))
    runner.run(tokens_of(96), max_tokens=1)
    shared = ("entries.r1", "keys.r1", "entries.r2", "keys.r2")
    before = runner.pages(*shared)
    assert runner.run([*tokens_of(96), *tokens_of(30, 1)]).cached_tokens == 96
    assert runner.pages(*shared) == before


@pytest.mark.parametrize(
    ("drafter", "hits", "urgent"),
    [("none", [28], 50), ("dspark", [28, 30], 50), ("dspark", [28], 9)],
    ids=["pages driven out", "drafts, a hit after a hit", "drafts, pages found again"],
)
def test_preempted_at_any_step_sees_the_same_again(
    make: Make, drafting: Path, drafter: str, hits: list[int], urgent: int
) -> None:
    """While rows are replayed, between chunks of the prompt, and after each token.

    The cut follows from the prompt, not from what a sequence is by then; a replay that begins anew
    makes the approximations that were made first, those of who left the pages among them; what
    drafts left behind goes with the pages.
    """
    prompt, cache = [*tokens_of(28), *tokens_of(14, 2)], bounded(12)
    alone = make(cache, drafting)
    for hit in hits:
        alone.run(prompt[:hit], max_tokens=1)
    expected = alone.run(prompt, max_tokens=7)
    # Seven pages for the request, and as many for those that drive it out.
    runner = make(
        cache, drafting, drafter=drafter, kv_pages=8, max_sequences=1, max_batch_tokens=10
    )
    results = runner.preempted_everywhere(prompt, hits, tokens_of(urgent, 5), max_tokens=7)
    for result in (expected, *results):
        assert (result.cached_tokens, result.exact) == (hits[-1], False)
        assert bits(result) == bits(expected)
    # Three chunks, and a few steps that bring tokens.
    assert len(results) > 3 + 3
    if drafter != "none":
        assert results[-1].drafted > results[-1].accepted > 0


def test_an_exact_request_does_not_see_what_is_bounded(make: Make) -> None:
    runner, prompt = make(bounded(12)), [*tokens_of(60), *tokens_of(40, 1)]
    runner.run(tokens_of(60))
    assert not runner.run(prompt).exact
    found = runner.run(prompt, exact=True)
    assert found.exact
    assert bits(found) == bits(make("pages").run(prompt))


def test_outputs_of_one_prompt_share_it(make: Make) -> None:
    prompt = tokens_of(70)
    many = make().run(prompt, n=3, temperature=1.0, seed=5)
    again = make(max_batch_tokens=7).run(prompt, n=3, temperature=1.0, seed=5)
    assert bits(many) == bits(again)


def test_too_few_kept_rows_are_refused_with_the_minimum(make: Make) -> None:
    with pytest.raises(CompositionError, match=r"keeps 13 rows .* need at least 14"):
        make(options=V41Options(decoder_keep=13))
    make(options=V41Options(decoder_keep=14))


def test_prompt_logprobs_need_every_row(make: Make) -> None:
    runner = make()
    with pytest.raises(RequestError, match=r"last 20 rows of a prompt; set model_component"):
        runner.submit(tokens_of(30), prompt_logprobs=1)
    assert runner.run(tokens_of(20), prompt_logprobs=1).error is None
    whole = make(options=V41Options(decoder="off"))
    assert whole.run(tokens_of(30), prompt_logprobs=1).error is None


def test_images_are_refused_and_hurt_nobody_else(make: Make, tmp_path: Path) -> None:
    model = write_tiny(tmp_path, vision_config={}, image_token_id=7)
    runner = make("pages", model=model)
    plain = [token for token in tokens_of(30) if token != 7]
    expected = bits(runner.run(plain))
    bad, good = runner.submit([*plain, 7]), runner.submit(plain)
    failed, fine = runner.finish(bad, good)
    assert "images are not supported" in str(failed.error)
    assert bits(fine) == expected


def test_named_options_reach_the_model(make: Make) -> None:
    runner = make(options=Choice(use="deepseek-v41", options={"decoder": "off"}))
    assert runner.engine.spec.decoder_keep == 0


@pytest.mark.parametrize("length", [1, 2, 3, 37])
def test_pages_of_one_token(make: Make, length: int) -> None:
    """Those of entries for two tokens hold one; prompts may be as short as they can be."""
    prompt = tokens_of(length)
    found = make("pages", page_size=1, kv_pages=512).run(prompt, max_tokens=4)
    assert bits(found) == bits(make("pages").run(prompt, max_tokens=4))


@pytest.mark.parametrize("batch", [1, 5, 13])
def test_a_bounded_replay_does_not_depend_on_chunks(make: Make, batch: int) -> None:
    """Also where one ends within the replayed rows, or at the end of the hit."""
    prompt, results = [*tokens_of(61), *tokens_of(9, 1)], []
    for tokens in (batch, 64):
        runner = make(bounded(12), max_batch_tokens=tokens)
        runner.run(tokens_of(61), max_tokens=1)
        found = runner.run(prompt)
        # An entry of two tokens is found whole or not at all.
        assert (found.cached_tokens, found.exact) == (60, False)
        results.append(bits(found))
    assert results[0] == results[1]


def test_a_hit_no_longer_than_the_replay_is_none(make: Make) -> None:
    prompt = [*tokens_of(16), *tokens_of(20, 1)]
    runner = make()
    runner.run(tokens_of(16), max_tokens=1)
    found = runner.run(prompt)
    assert (found.cached_tokens, found.exact) == (0, True)
    assert bits(found) == bits(make("pages").run(prompt))
