"""Faults at every point of a round: only offenders fail, nothing leaks, nothing hangs."""

import random
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_core.builtin.configs import FixedBudgetConfig
from deepinfer_core.builtin.fixed_budget import FixedBudget
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.assembly import assemble
from deepinfer_core.engine.engine import Engine
from deepinfer_core.errors import DeviceLostError, EngineError
from deepinfer_core.interfaces.budget import BudgetContext
from deepinfer_core.requests import FinishReason, Request, SamplingParams
from deepinfer_core.testing.fakes import ScriptedDrafter

POISON = 251
"""A token id whose presence makes the faulty executor raise."""


class Proxy:
    """Passes everything on, and asks ``fault(point)`` before the named methods."""

    def __init__(self, inner: Any, fault: Any, points: Any) -> None:
        self._inner, self._fault, self._points = inner, fault, points

    def __getattr__(self, name: Any) -> Any:
        found = getattr(self._inner, name)
        if name not in self._points:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._fault(self._points[name])
            return found(*args, **kwargs)

        return call


class FaultyExecutor:
    """Raises while waiting for steps, in logits, or for a poisonous token; can make NaN."""

    def __init__(
        self, inner: Any, fault: Any, poison: Any = False, nan: Any = False, lost: Any = False
    ) -> None:
        self._inner, self._fault = inner, fault
        self._poison, self._nan, self._lost = poison, nan, lost

    def launch(self, batch: Any, on_launch: Any = None) -> Any:
        self._fault("launch")
        pending = self._inner.launch(batch, on_launch)
        bad = POISON in batch.token_ids.tolist()
        return FaultyPending(pending, self, bad, batch)

    def __getattr__(self, name: Any) -> Any:
        return getattr(self._inner, name)


class FaultyPending:
    def __init__(self, pending: Any, owner: Any, bad: Any, batch: Any) -> None:
        self._pending, self._owner, self._bad, self._batch = pending, owner, bad, batch

    def wait(self) -> Any:
        output = self._pending.wait()
        self._owner._fault("wait")
        if self._bad and self._owner._poison:
            raise RuntimeError("poisonous token")
        if self._bad and self._owner._lost:
            raise DeviceLostError("cable pulled")
        return FaultyOutput(output, self._owner, self._batch)


class FaultyOutput:
    def __init__(self, output: Any, owner: Any, batch: Any) -> None:
        self._output, self._owner, self._batch = output, owner, batch
        self.taps = output.taps

    @property
    def num_rows(self) -> Any:
        return self._output.num_rows

    def logits(self, start: Any, stop: Any) -> Any:
        self._owner._fault("logits")
        logits = self._output.logits(start, stop).clone()
        if self._owner._nan:
            starts = self._batch.query_starts
            for at, sequence in enumerate(self._batch.logit_sequences.tolist()):
                part = self._batch.token_ids[starts[sequence] : starts[sequence + 1]]
                if POISON in part.tolist():
                    logits[at, 5] = torch.nan
        return logits


@pytest.fixture(scope="module")
def parts_of(tiny_model: Any) -> Any:
    def make(**options: Any) -> Any:
        options = {"page_size": 8, "kv_pages": 60, "max_batch_tokens": 32, **options}
        config = EngineConfig(model=str(tiny_model), engine=EngineOptions(**options))
        return assemble(config, discover=False, environ={})

    return make


def faulty_engine(parts: Any, fault: Any = lambda point: None, **kinds: Any) -> Any:
    executor = FaultyExecutor(parts.executor, fault, **kinds)
    cache = Proxy(
        parts.cache,
        fault,
        {"open": "open", "reserve": "reserve", "commit": "commit", "fork": "fork"},
    )
    scheduler = Proxy(parts.scheduler, fault, {"schedule": "schedule"})
    return Engine(attrs.evolve(parts, executor=executor, cache=cache, scheduler=scheduler))


def submit(engine: Any, name: Any, prompt: Any, **params: Any) -> None:
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params}
    engine.submit(
        Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**params))
    )


def run(engine: Any, limit: Any = 3000) -> Any:
    results: dict[str, Any] = {}
    for _ in range(limit):
        if not engine.has_work:
            return results
        for delta in engine.step():
            result = engine.take_result(delta.request_id)
            if result is not None:
                results[delta.request_id] = result
    raise AssertionError("hangs")


def expected(parts_of: Any) -> Any:
    engine = faulty_engine(parts_of())
    for at in range(6):
        submit(engine, f"r{at}", [at + 1] * (3 + 9 * at), n=1 + at % 2)
    return {name: [o.token_ids for o in r.outputs] for name, r in run(engine).items()}


@pytest.fixture(scope="module")
def truth(parts_of: Any) -> Any:
    return expected(parts_of)


POINTS = ("schedule", "open", "reserve", "commit", "fork", "launch", "wait", "logits")
DRAFT_POINTS = ("propose", "observe", "drafted", "judge")


def with_drafts(parts: Any, truth: Any, fault: Any, wrong_every: int) -> Any:
    """The parts with a drafter that knows most of the truth and may fail."""
    known = [[*[at + 1] * (3 + 9 * at), *tokens] for at in range(6) for tokens in truth[f"r{at}"]]
    drafter = Proxy(
        ScriptedDrafter.of_outputs(known, wrong_every=wrong_every),
        fault,
        {"propose": "propose", "observe": "observe", "commit": "drafted", "judge": "judge"},
    )
    budget = FixedBudget(FixedBudgetConfig(), BudgetContext(max_drafts=3))
    return attrs.evolve(parts, drafter=drafter, budget=budget)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=st.lists(
        st.tuples(st.sampled_from(POINTS + DRAFT_POINTS), st.integers(0, 25)),
        min_size=1,
        max_size=4,
    ),
    overlap=st.booleans(),
    wrong_every=st.sampled_from([None, 0, 3]),
    aborts=st.dictionaries(st.integers(0, 30), st.integers(0, 5), max_size=2),
)
def test_single_faults_anywhere_lose_nothing(
    parts_of: Any, truth: Any, faults: Any, overlap: Any, wrong_every: Any, aborts: Any
) -> None:
    """Each fault happens once, so a repeated step succeeds: everybody gets the right tokens.

    With drafts and without.
    """
    counts: dict[str, int] = {}
    due = set(faults)

    def fault(point: Any) -> None:
        counts[point] = counts.get(point, -1) + 1
        if (point, counts[point]) in due:
            raise RuntimeError(f"injected at {point} {counts[point]}")

    parts = parts_of(overlap=overlap)
    if wrong_every is not None:
        parts = with_drafts(parts, truth, fault, wrong_every)
    engine = faulty_engine(parts, fault)
    for at in range(6):
        submit(engine, f"r{at}", [at + 1] * (3 + 9 * at), n=1 + at % 2)
    results: dict[str, Any] = {}
    steps = 0
    while engine.has_work:
        if steps in aborts:
            engine.abort(f"r{aborts[steps]}")
        steps += 1
        assert steps < 3000, "hangs"
        for delta in engine.step():
            result = engine.take_result(delta.request_id)
            if result is not None:
                results[delta.request_id] = result
    assert set(results) == set(truth)
    assert engine.stats().kv_pages_used == 0
    if engine.failure is not None:  # three scheduler faults in a row are its end
        assert sum(point in ("schedule", "open", "reserve") for point, _ in due) >= 3
        return
    for name, result in results.items():
        for output, tokens in zip(result.outputs, truth[name], strict=True):
            if output.finish_reason is FinishReason.ABORT:
                assert tokens[: len(output.token_ids)] == output.token_ids
            elif output.error is None:
                assert output.token_ids == tokens
            else:  # two faults hit the same sequence's step and its repetitions
                assert len(due) >= 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["poison", "nan"])
@pytest.mark.parametrize("late", [False, True])
def test_only_the_offender_fails(
    parts_of: Any, truth: Any, overlap: Any, kind: Any, late: Any
) -> None:
    engine = faulty_engine(parts_of(overlap=overlap), **{kind: True})
    for at in range(6):
        submit(engine, f"r{at}", [at + 1] * (3 + 9 * at), n=1 + at % 2)
    if late:
        for _ in range(4):
            engine.step()
    submit(engine, "bad", [9, 9, POISON])
    results = run(engine)
    bad = results.pop("bad")
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert "request 'bad'" in bad.error
    assert ("poisonous token" if kind == "poison" else "NaN") in bad.error
    for name, result in results.items():
        assert [o.token_ids for o in result.outputs] == truth[name]
    assert engine.stats().kv_pages_used == 0
    assert engine.stats().num_failed == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_draft_makes_nobody_an_offender(parts_of: Any, truth: Any, overlap: Any) -> None:
    """Drafts that make a step raise are left out when it is repeated."""
    parts = with_drafts(parts_of(overlap=overlap), truth, lambda point: None, 0)
    parts.drafter._inner._script = lambda request: [POISON] * 3
    engine = faulty_engine(parts, poison=True)
    for at in range(6):
        submit(engine, f"r{at}", [at + 1] * (3 + 9 * at), n=1 + at % 2)
    for name, result in run(engine).items():
        assert [o.token_ids for o in result.outputs] == truth[name]
    assert engine.stats().kv_pages_used == 0
    assert engine.stats().num_failed == 0


def test_a_nan_says_where(parts_of: Any) -> None:
    engine = faulty_engine(parts_of(), nan=True)
    submit(engine, "bad", [1, 2, POISON])
    error = run(engine)["bad"].error
    assert "token 3 (0 of the output)" in error
    assert "first at token 5" in error


def test_a_nan_in_a_page_does_not_reach_its_next_owner(parts_of: Any) -> None:
    parts = parts_of(kv_pages=20)
    engine = Engine(parts)
    for storage in parts.executor._storages:
        for tensor in (*storage.keys, *storage.values):
            tensor.fill_(torch.nan)
    submit(engine, "r", [1, 2, 3])
    assert run(engine)["r"].error is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lost_device_ends_every_stream(parts_of: Any, overlap: Any) -> None:
    engine = faulty_engine(parts_of(overlap=overlap), lost=True)
    submit(engine, "a", [1, 2], max_tokens=50)
    for _ in range(3):
        engine.step()
    submit(engine, "b", [1, POISON])
    submit(engine, "c", [1] * 200, max_tokens=50)
    results = run(engine)
    assert {r.outputs[0].finish_reason for r in results.values()} == {FinishReason.ERROR}
    assert set(results) == {"a", "b", "c"}
    assert "cable pulled" in results["c"].error
    with pytest.raises(EngineError, match="cable pulled"):
        submit(engine, "d", [1])
    assert engine.stats().kv_pages_used == 0
    engine.close()


def test_a_scheduler_that_always_fails_ends_the_engine(parts_of: Any) -> None:
    def fault(point: Any) -> None:
        if point == "schedule":
            raise KeyError("no idea")

    engine = faulty_engine(parts_of(), fault)
    submit(engine, "r", [1])
    results = run(engine)
    assert "scheduler 'fcfs' (builtin) failed 3 times" in results["r"].error


def test_a_scheduler_that_grants_more_than_remains_is_named(parts_of: Any) -> None:
    class Generous:
        def schedule(self, round: Any) -> None:
            for sequence in (*round.running, *round.waiting):
                round.grant(sequence, sequence.remaining + 1)

    engine = Engine(attrs.evolve(parts_of(), scheduler=Generous()))
    submit(engine, "r", [1, 2])
    problem = "scheduler granted 3 tokens to sequence 0, of which 2 remain"
    assert f"failed 3 times in a row: EngineError: {problem}" in run(engine)["r"].error


def test_a_scheduler_that_grants_nothing_ends_the_engine(parts_of: Any) -> None:
    class Idle:
        def schedule(self, round: Any) -> None:
            pass

    engine = Engine(attrs.evolve(parts_of(), scheduler=Idle()))
    submit(engine, "r", [1])
    results = run(engine)
    assert "granted nothing in 500 rounds, though 0 sequences run and 1 wait" in results["r"].error


def test_an_observer_that_raises_is_dropped(parts_of: Any) -> None:
    class Bad:
        def __init__(self) -> None:
            self.calls = 0

        def observe(self, event: Any) -> None:
            self.calls += 1
            raise ValueError("broken listener")

        def close(self) -> None:
            raise ValueError("still broken")

    bad = Bad()
    engine = Engine(attrs.evolve(parts_of(), observers=(("bad", bad),)))
    submit(engine, "r", [1])
    assert run(engine)["r"].error is None
    engine.close()
    assert bad.calls == 1


def test_random_lives_leave_nothing_behind(parts_of: Any) -> None:
    """Arrivals, aborts, faults and page pressure, mixed at random."""
    for seed in range(4):
        rng = random.Random(seed)

        def fault(point: Any, rng: Any = rng) -> None:
            if point in ("wait", "logits", "commit") and rng.random() < 0.05:
                raise RuntimeError("injected")

        engine = faulty_engine(parts_of(kv_pages=30, overlap=bool(seed % 2)), fault)
        names = []
        for at in range(60):
            if rng.random() < 0.5:
                name = f"r{at}"
                submit(
                    engine, name, [rng.randrange(256) for _ in range(rng.randrange(1, 60))],
                    max_tokens=rng.randrange(1, 30), n=rng.choice([1, 2]),
                    prompt_logprobs=rng.choice([None, 1]),
                )  # fmt: skip
                names.append(name)
            if names and rng.random() < 0.1:
                engine.abort(rng.choice(names))
            engine.step()
        run(engine)
        assert engine.stats().kv_pages_used == 0
        assert engine.stats().num_finished == len(names)


def test_on_launch_comes_once_before_the_forward_pass_and_only_with_one(parts_of: Any) -> None:
    seen: list[str] = []

    def fault(point: str) -> None:
        if point in ("schedule", "launch", "wait"):
            seen.append(point)
            if point == "launch" and seen.count("launch") == 1:
                raise RuntimeError("a launch that is repeated")

    with faulty_engine(parts_of(), fault) as engine:
        engine.step(on_launch=lambda: seen.append("told"))
        assert seen == []
        submit(engine, "a", [1, 2, 3])
        engine.step(on_launch=lambda: seen.append("told"))
        assert seen == ["schedule", "launch", "launch", "wait"]  # a step repeated tells nobody
        engine.step(on_launch=lambda: seen.append("told"))
        assert seen[4:] == ["schedule", "launch", "told", "wait"]
