"""Drafts in the engine: whatever is proposed and verified, the same comes out as without."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from deepinfer_core.components import Slot
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.engine.speculation import (
    MOST_FAILURES,
    PROBE_ROUNDS,
    PROBE_SEQUENCES,
    SUSPEND_ROUNDS,
    WAKE_ROUNDS,
)
from deepinfer_core.interfaces.budget import BudgetRequest, StepTime
from deepinfer_core.interfaces.drafter import CommittedRows, Draft, DraftOutcome, DraftRequest
from deepinfer_core.requests import FinishReason, Request, SamplingParams
from deepinfer_core.testing import example_cache
from deepinfer_core.testing.example_cache import SnapshotCache
from deepinfer_core.testing.fakes import ScriptedDrafter
from deepinfer_core.testing.plugins import offer, plugin

TAPS = ("embedding", "layer.0", "layer.2")


class GuessingDrafter(ScriptedDrafter):
    """Knows what comes, and spoils some of it; checks what it is told."""

    def __init__(self, known: Sequence[Sequence[int]], spoil: float, seed: int = 0) -> None:
        super().__init__(self._guess, taps=TAPS)
        self._known_outputs, self._spoil, self._random = known, spoil, random.Random(seed)
        self.rows: dict[int, list[tuple[int, int]]] = {}
        self.values: dict[int, list[torch.Tensor]] = {}

    def _guess(self, request: DraftRequest) -> list[int]:
        tokens = list(request.token_ids)
        assert request.limit >= 1
        assert [token for _, token in self.rows[request.sequence_id]] == tokens[:-1]
        found = [known for known in self._known_outputs if list(known[: len(tokens)]) == tokens]
        coming = list(self._random.choice(found)[len(tokens) :]) if found else [7, 7, 7]
        return [
            self._random.randrange(272) if self._random.random() < self._spoil else token
            for token in coming
        ]

    def observe(self, rows: CommittedRows, taps: Mapping[str, torch.Tensor]) -> None:
        super().observe(rows, taps)
        ends = rows.query_starts.tolist()
        pairs = list(zip(rows.positions.tolist(), rows.token_ids.tolist(), strict=True))
        for at, sequence_id in enumerate(rows.sequence_ids):
            own = self.rows.setdefault(sequence_id, [])
            own += pairs[ends[at] : ends[at + 1]]
            assert [position for position, _ in own] == list(range(len(own))), "a gap"
            values = torch.cat([taps[name][ends[at] : ends[at + 1]] for name in TAPS], 1)
            self.values.setdefault(sequence_id, []).append(values.clone())

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        super().commit(sequence_id, num_tokens)
        del self.rows.get(sequence_id, [])[num_tokens:]

    def fork(self, parent_id: int, child_id: int) -> None:
        super().fork(parent_id, child_id)
        self.rows[child_id] = list(self.rows[parent_id])

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self.rows.pop(sequence_id, None)


class RandomBudget:
    """Spends rows at random."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.times: list[tuple[int, float, float]] = []

    def total(self, requests: Sequence[BudgetRequest], num_other_tokens: int, limit: int) -> int:
        return self._random.randint(0, min(limit, sum(r.num_drafts for r in requests)))

    def split(self, requests: Sequence[BudgetRequest], total: int) -> list[int]:
        shares = []
        for request in requests:
            shares.append(self._random.randint(0, min(total, request.num_drafts)))
            total -= shares[-1]
        return shares

    def observe(self, step: StepTime) -> None:
        self.times.append((step.num_tokens, step.step_ms, step.draft_ms))


class ConstantBudget(RandomBudget):
    """Spends a settable number of rows."""

    rows = 0

    def total(self, requests: Sequence[BudgetRequest], num_other_tokens: int, limit: int) -> int:
        return min(self.rows, limit, sum(r.num_drafts for r in requests))

    def split(self, requests: Sequence[BudgetRequest], total: int) -> list[int]:
        shares = []
        for request in requests:
            shares.append(min(total, request.num_drafts))
            total -= shares[-1]
        return shares


def drafting(drafter: Any, budget: Any = None) -> dict[str, Any]:
    """Arguments of ``make_engine`` that compose a drafter and a budget."""
    offers = [offer(Slot.DRAFTER, "toy", build=lambda c, x: drafter, auto=False)]
    config = {"drafter": "toy"}
    if budget is not None:
        offers.append(offer(Slot.BUDGET, "toy", build=lambda c, x: budget, auto=False))
        config["budget"] = "toy"
    return {"plugins": [plugin("toy_plugin", *offers)], "config": config}


Submit = Callable[..., None]


def submit_mixed(submit: Submit, seed: int = 0, count: int = 12) -> None:
    rng = random.Random(seed)
    for at in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 2, 5, 17, 40, 90]))]
        filters: Any = rng.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
        submit(
            f"r{at}",
            prompt,
            max_tokens=rng.choice([1, 2, 9, 20]),
            temperature=rng.choice([0.0, 0.7, 30.0]),
            seed=at,
            n=rng.choice([1, 1, 1, 3]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            logit_bias=rng.choice([{}, {5: 3.0}]),
            min_tokens=rng.choice([0, 1]),
            logprobs=rng.choice([None, 0, 2]),
            prompt_logprobs=rng.choice([None, 1]),
            **filters,
        )


def facts(results: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of a result that drafts must not change."""
    return {
        name: (
            [
                (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs, o.error)
                for o in result.outputs
            ],
            result.prompt_logprobs,
        )
        for name, result in results.items()
    }


@pytest.fixture(scope="module")
def plain(tiny_model: Any) -> Any:
    """The mixed requests without drafts, and the sequences that come out."""
    options = EngineOptions(page_size=8, kv_pages=400, max_batch_tokens=64)
    results = {}
    known = []
    with Engine.from_config(
        EngineConfig(model=str(tiny_model), engine=options), discover=False, environ={}
    ) as engine:

        def submit(name: str, prompt: list[int], **params: Any) -> None:
            params = {"ignore_eos": True, **params}
            engine.submit(
                Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**params))
            )

        submit_mixed(submit)
        while engine.has_work:
            for delta in engine.step():
                if (result := engine.take_result(delta.request_id)) is not None:
                    results[delta.request_id] = result
    for result in results.values():
        known += [[*result.prompt_token_ids, *o.token_ids] for o in result.outputs]
    return facts(results), known


@pytest.mark.parametrize("spoil", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"overlap": True},
        {"overlap": True, "max_batch_tokens": 24},
        {"kv_pages": 16},
        {"kv_pages": 16, "overlap": True, "max_sequences": 3},
    ],
    ids=str,
)
def test_drafts_change_nothing(
    make_engine: Any, drive: Any, plain: Any, options: Any, spoil: float
) -> None:
    expected, known = plain
    drafter, budget = GuessingDrafter(known, spoil), RandomBudget(1)
    driver = drive(make_engine(**options, **drafting(drafter, budget)))
    submit_mixed(driver.submit)
    results = driver.run()
    assert facts(results) == expected
    stats = driver.engine.stats()
    assert stats.kv_pages_used == 0
    assert sum(o.accepted for o in drafter.outcomes) == stats.num_accepted
    assert sum(o.verified for o in drafter.outcomes) == stats.num_drafted
    assert stats.num_drafted > 0
    assert sum(stats.accepted_by_position) == stats.num_accepted
    assert sum(result.accepted for result in results.values()) == stats.num_accepted
    if spoil == 0.0 and not options.get("kv_pages"):
        assert stats.num_accepted > 0
    engine_ids = set(drafter.rows)
    driver.submit("flush", [1], max_tokens=1)
    driver.run()
    assert not engine_ids & set(drafter.rows), "sequences were not released"
    assert {rows for rows, _, _ in budget.times} != {1}


def test_taps_are_those_of_the_same_rows_without_drafts(make_engine: Any, drive: Any) -> None:
    prompt = list(range(1, 40))
    plain = drive(make_engine())
    plain.submit("r", prompt, max_tokens=30)
    tokens = plain.run()["r"].outputs[0].token_ids
    shown = []
    for spoil, budget in ((1.0, ConstantBudget()), (0.3, None)):
        drafter = GuessingDrafter([[*prompt, *tokens]], spoil, seed=3)
        driver = drive(make_engine(max_batch_tokens=16, **drafting(drafter, budget)))
        driver.submit("r", prompt, max_tokens=30)
        assert driver.run()["r"].outputs[0].token_ids == tokens
        shown.append(torch.cat(drafter.values[0]))
    assert shown[0].shape == (39 + 29, 3 * 48)
    assert torch.equal(shown[0], shown[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_accepted_runs_end_where_outputs_end(make_engine: Any, drive: Any, overlap: bool) -> None:
    """Stop ids, stop strings, end tokens, lengths and the context, in the middle of a run."""
    printable = dict.fromkeys(range(97, 123), 100)
    plain = drive(make_engine(overlap=overlap, config={"max_model_len": 60}))
    plain.submit("probe", list(b"hello"), max_tokens=40, logit_bias=printable)
    output = plain.run()["probe"].outputs[0]
    known = [[*b"hello", *output.token_ids]]
    endings: dict[str, dict[str, Any]] = {
        "length": {"max_tokens": 11},
        "one": {"max_tokens": 1},
        "context": {"max_tokens": None},
        "id": {"max_tokens": 40, "stop_token_ids": (output.token_ids[6],)},
        "string": {"max_tokens": 40, "stop": (output.text[5:8],)},
        "min": {"max_tokens": 40, "min_tokens": 9, "stop": (output.text[5:7],)},
    }
    found = []
    for extra in ({}, drafting(GuessingDrafter(known, 0.0))):
        config = {**extra.pop("config", {}), "max_model_len": 60}
        driver = drive(make_engine(overlap=overlap, config=config, **extra))
        for name, params in endings.items():
            driver.submit(name, list(b"hello"), logit_bias=printable, **params)
        results = driver.run()
        streamed = {
            name: "".join(delta.text for delta in driver.deltas if delta.request_id == name)
            for name in endings
        }
        assert streamed == {name: result.text for name, result in results.items()}
        found.append((facts(results), driver.engine.stats()))
    assert found[0][0] == found[1][0]
    reasons = {name: outputs[0][2] for name, (outputs, _) in found[1][0].items()}
    assert reasons["string"] is reasons["id"] is FinishReason.STOP
    assert reasons["length"] is reasons["context"] is FinishReason.LENGTH
    assert found[1][1].num_accepted > 20
    assert found[1][1].num_steps < found[0][1].num_steps / 2
    assert found[1][1].tau > 2
    assert found[1][1].kv_pages_used == 0


def test_one_delta_carries_a_run(make_engine: Any, drive: Any) -> None:
    plain = drive(make_engine())
    plain.submit("r", [1, 2, 3], max_tokens=20)
    tokens = plain.run()["r"].outputs[0].token_ids
    driver = drive(
        make_engine(max_drafts=4, **drafting(GuessingDrafter([[1, 2, 3, *tokens]], 0.0)))
    )
    driver.submit("r", [1, 2, 3], max_tokens=20, logprobs=0)
    result = driver.run()["r"]
    lengths = [len(delta.token_ids) for delta in driver.deltas]
    assert lengths == [1, 5, 5, 5, 4]
    assert [len(delta.logprobs) for delta in driver.deltas] == lengths
    assert (result.drafted, result.accepted) == (15, 15)
    assert driver.engine.stats().accepted_by_position == (4, 4, 4, 3)


class FailingDrafter(GuessingDrafter):
    """Raises in one of its methods, from some call on or now and then."""

    def __init__(self, method: str, known: Any, every: int) -> None:
        super().__init__(known, 0.2)
        inner, calls = getattr(self, method), [0]

        def fail(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] % every == 0:
                raise RuntimeError(f"injected into {method}")
            return inner(*args)

        setattr(self, method, fail)

    def _guess(self, request: DraftRequest) -> list[int]:
        self.rows[request.sequence_id] = [(0, token) for token in request.token_ids[:-1]]
        return super()._guess(request)

    def observe(self, rows: CommittedRows, taps: Mapping[str, torch.Tensor]) -> None:
        assert set(taps) == set(TAPS)  # after a failure there may be gaps

    def fork(self, parent_id: int, child_id: int) -> None:
        pass


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("method", ["propose", "observe", "judge", "commit", "fork", "release"])
def test_a_drafter_that_raises_costs_nothing(
    make_engine: Any, drive: Any, plain: Any, method: str, every: int
) -> None:
    expected, known = plain
    drafter = FailingDrafter(method, known, every)
    driver = drive(make_engine(**drafting(drafter), overlap=every == 3))
    submit_mixed(driver.submit)
    assert facts(driver.run()) == expected
    assert driver.engine.stats().kv_pages_used == 0
    if every == 1:
        assert len(drafter.requests) <= 20 * MOST_FAILURES


class LyingDrafter(GuessingDrafter):
    """Answers with drafts that break its contract."""

    def __init__(self, lie: str) -> None:
        super().__init__([], 0.0)
        self._lie = lie

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        good = Draft(token_ids=[1], confidences=[0.5])
        answers = {
            "count": [good] * (len(requests) + 1),
            "vocabulary": [Draft(token_ids=[272], confidences=[0.5]) for _ in requests],
            "negative": [Draft(token_ids=[-1], confidences=[0.5]) for _ in requests],
            "confidences": [Draft(token_ids=[1]) for _ in requests],
            "limit": [Draft(token_ids=[1] * 9, confidences=[0.5] * 9) for _ in requests],
            "rows": [
                Draft(token_ids=[1], confidences=[0.5], distributions=torch.ones(2, 272) / 272)
                for _ in requests
            ],
        }
        return answers[self._lie]


@pytest.mark.parametrize("lie", ["count", "vocabulary", "negative", "confidences", "limit", "rows"])
def test_a_drafter_that_lies_is_not_believed(
    make_engine: Any, drive: Any, plain: Any, lie: str
) -> None:
    driver = drive(make_engine(**drafting(LyingDrafter(lie))))
    submit_mixed(driver.submit)
    assert facts(driver.run()) == plain[0]
    assert driver.engine.stats().num_drafted == 0


def test_a_budget_that_raises_or_overspends_costs_nothing(
    make_engine: Any, drive: Any, plain: Any
) -> None:
    class Wild(RandomBudget):
        def total(self, requests: Any, num_other_tokens: int, limit: int) -> int:
            return 10_000

        def split(self, requests: Any, total: int) -> list[int]:
            return [total + 1 for _ in requests]

    class Raising(RandomBudget):
        def observe(self, step: StepTime) -> None:
            raise ZeroDivisionError

    for budget in (Wild(), Raising()):
        driver = drive(make_engine(**drafting(GuessingDrafter(plain[1], 0.1), budget)))
        submit_mixed(driver.submit)
        assert facts(driver.run()) == plain[0]


def test_drafting_is_suspended_and_resumed(make_engine: Any, drive: Any) -> None:
    drafter, budget = ScriptedDrafter(lambda request: [1, 2, 3]), ConstantBudget()
    driver = drive(make_engine(**drafting(drafter, budget)))
    driver.submit("r", [1, 2, 3], max_tokens=200)
    for _ in range(1 + SUSPEND_ROUNDS + PROBE_ROUNDS - 2):
        driver.step()
    assert len(drafter.requests) == SUSPEND_ROUNDS
    for _ in range(2 * PROBE_ROUNDS):
        driver.step()
    assert len(drafter.requests) == SUSPEND_ROUNDS + 2
    assert driver.engine.stats().num_drafted == 0
    assert sum(draft_ms > 0 for _, _, draft_ms in budget.times) == SUSPEND_ROUNDS + 2
    budget.rows = 2
    for _ in range(WAKE_ROUNDS):
        driver.step()
        if driver.engine.stats().num_drafted:
            break
    assert len(drafter.requests) == SUSPEND_ROUNDS + 3
    assert driver.engine.stats().num_drafted == 2


def test_a_drafter_hears_of_every_end(make_engine: Any, drive: Any) -> None:
    """Also of those of the last step, when the engine is closed."""
    drafter = ScriptedDrafter(lambda request: [1])
    engine = make_engine(**drafting(drafter))
    driver = drive(engine)
    for name in ("a", "b"):
        driver.submit(name, [1, 2, 3], max_tokens=4)
    driver.run()
    engine.close()
    assert sorted(drafter.released) == [0, 1]


def test_a_probe_drafts_for_a_few_and_verifies_nothing(make_engine: Any, drive: Any) -> None:
    """Under load a probe must not cost what it is to find out."""
    drafter, budget = ScriptedDrafter(lambda request: [1, 2, 3]), ConstantBudget()
    users = 2 * PROBE_SEQUENCES
    driver = drive(make_engine(**drafting(drafter, budget)))
    for at in range(users):
        driver.submit(f"r{at}", [1 + at, 2, 3], max_tokens=120)
    while len(drafter.requests) < users * SUSPEND_ROUNDS:
        driver.step()
    del drafter.requests[:]
    for _ in range(2 * PROBE_ROUNDS + 1):
        driver.step()
    probed = [request.sequence_id for request in drafter.requests]
    assert sorted(probed) == sorted(set(probed)), "somebody was probed twice before others"
    assert len(probed) == users
    assert driver.engine.stats().num_drafted == 0


def test_confidences_reach_the_budget_two_rounds_late(make_engine: Any, drive: Any) -> None:
    class Noting(ConstantBudget):
        rows = 1

        def __init__(self) -> None:
            super().__init__()
            self.asked: list[BudgetRequest] = []

        def split(self, requests: Sequence[BudgetRequest], total: int) -> list[int]:
            self.asked += requests
            return super().split(requests, total)

    class Counting(ScriptedDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            self.requests += requests
            return [Draft(token_ids=[1], confidences=[len(self.requests) / 100]) for _ in requests]

    budget, drafter = Noting(), Counting(lambda request: ())
    driver = drive(make_engine(**drafting(drafter, budget)))
    driver.submit("r", [1, 2, 3], max_tokens=8)
    driver.run()
    assert [request.confidences for request in budget.asked[:4]] == [
        (0.01,),
        (0.02,),
        (0.03,),
        (0.04,),
    ]
    assert [request.lagged for request in budget.asked[:4]] == [(), (), (0.01,), (0.02,)]


@pytest.mark.parametrize("overlap", [False, True])
def test_rejection_runs_every_kind_of_request(make_engine: Any, drive: Any, overlap: bool) -> None:
    """Greedy outputs are those without drafts; the others have their length and end cleanly."""

    class Uniform(ScriptedDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            rng = random.Random(len(self.requests))
            self.requests += requests
            drafts = []
            for request in requests:
                count = rng.randint(0, request.limit)
                ids = [rng.randrange(272) for _ in range(count)]
                rows = torch.full((count, 272), 1 / 272)
                drafts.append(Draft(token_ids=ids, confidences=[0.1] * count, distributions=rows))
            return drafts

    def submit(driver: Any) -> None:
        for at in range(8):
            driver.submit(
                f"r{at}", [at + 1] * (at + 1), max_tokens=15, seed=at, n=1 + at % 2,
                temperature=[0.0, 5.0][at % 2], top_k=at % 3, logprobs=0,
            )  # fmt: skip

    plain, driver = (
        drive(make_engine(overlap=overlap, verification="rejection", **extra))
        for extra in ({}, drafting(Uniform(lambda request: ())))
    )
    submit(plain)
    submit(driver)
    expected, results = plain.run(), driver.run()
    for name, result in results.items():
        assert all(len(o.token_ids) == len(o.logprobs) == 15 for o in result.outputs)
        if int(name[1:]) % 2 == 0:
            assert [o.token_ids for o in result.outputs] == [
                o.token_ids for o in expected[name].outputs
            ]
    assert driver.engine.stats().kv_pages_used == 0
    assert driver.engine.stats().num_drafted > 50


def test_aborts_and_deadlines_with_drafts_in_flight(make_engine: Any, drive: Any) -> None:
    drafter = ScriptedDrafter(lambda request: [1, 2, 3])
    engine = make_engine(overlap=True, **drafting(drafter))
    for moment in range(10):
        driver = drive(engine)
        driver.submit("victim", [3] * 20, max_tokens=40, n=2)
        driver.submit("other", [5] * 20, max_tokens=6)
        for _ in range(moment):
            driver.step()
        engine.abort("victim")
        results = driver.run()
        assert len(results["other"].outputs[0].token_ids) == 6
        assert engine.stats().kv_pages_used == 0


def test_outcomes_are_reported_to_observers(make_engine: Any, drive: Any) -> None:
    from deepinfer_core.testing.fakes import RecordingObserver

    observer = RecordingObserver()
    parts = drafting(ScriptedDrafter(lambda request: [1, 2]))
    parts["plugins"].append(
        plugin("watching", offer(Slot.OBSERVER, "watch", build=lambda c, x: observer, auto=False))
    )
    parts["config"]["observer"] = ["watch"]
    driver = drive(make_engine(**parts))
    driver.submit("r", [1, 2], max_tokens=5)
    driver.run()
    steps = [event.fields for event in observer.events if event.name == "step.done"]
    (finished,) = [event.fields for event in observer.events if event.name == "request.finished"]
    assert sum(step["drafted"] for step in steps) == finished["drafted"] > 0
    assert sum(step["accepted"] for step in steps) == finished["accepted"]


def outcome_of(outcomes: Sequence[DraftOutcome]) -> list[tuple[int, int]]:
    return [(outcome.verified, outcome.accepted) for outcome in outcomes]


def test_the_drafter_learns_what_became_of_its_drafts(make_engine: Any, drive: Any) -> None:
    plain = drive(make_engine())
    plain.submit("r", [1, 2], max_tokens=7)
    tokens = plain.run()["r"].outputs[0].token_ids
    drafter = ScriptedDrafter.of_outputs([[1, 2, *tokens]], wrong_every=5)
    driver = drive(make_engine(max_drafts=3, **drafting(drafter)))
    driver.submit("r", [1, 2], max_tokens=7)
    driver.run()
    assert outcome_of(drafter.outcomes) == [(3, 2), (2, 2)]


def test_rows_of_a_cached_prefix_are_not_shown(make_engine: Any, drive: Any) -> None:
    class Watching(ScriptedDrafter):
        def __init__(self) -> None:
            super().__init__(lambda request: [1, 2, 3], taps=TAPS)
            self.shown: dict[int, dict[int, torch.Tensor]] = {}

        def observe(self, rows: CommittedRows, taps: Mapping[str, torch.Tensor]) -> None:
            owners = [
                sequence_id
                for at, sequence_id in enumerate(rows.sequence_ids)
                for _ in range(rows.query_starts[at + 1] - rows.query_starts[at])
            ]
            for at, (owner, position) in enumerate(zip(owners, rows.positions, strict=True)):
                values = torch.cat([taps[name][at] for name in TAPS])
                self.shown.setdefault(owner, {})[int(position)] = values

    drafter = Watching()
    parts = drafting(drafter)
    snapshots = offer(
        Slot.CACHE, "snapshots", build=lambda c, x: SnapshotCache(x), auto=False,
        offers=example_cache.OFFERS,
    )  # fmt: skip
    parts["plugins"].append(plugin("snapshot_plugin", snapshots))
    parts["config"]["cache"] = "snapshots"
    driver = drive(make_engine(max_batch_tokens=16, **parts))
    for name in ("first", "second"):
        driver.submit(name, list(range(1, 50)), max_tokens=8)
        driver.run()
    first, second = driver.results["first"], driver.results["second"]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    before, after = drafter.shown[0], drafter.shown[1]
    assert sorted(before) == list(range(56))
    assert sorted(after) == list(range(48, 56))
    assert all(torch.equal(before[position], values) for position, values in after.items())


def test_budgets_can_measure_steps(make_engine: Any, drive: Any, plain: Any) -> None:
    """Asked in the middle of things, between two steps; nothing that is alive notices."""
    contexts: list[Any] = []

    class Measuring(RandomBudget):
        def total(
            self, requests: Sequence[BudgetRequest], num_other_tokens: int, limit: int
        ) -> int:
            assert contexts[-1].step_ms(1 + num_other_tokens % 3) > 0
            return super().total(requests, num_other_tokens, limit)

    def build(config: Any, context: Any) -> Any:
        contexts.append(context)
        return Measuring()

    for _ in range(2):
        parts = drafting(GuessingDrafter(plain[1], 0.3))
        parts["plugins"].append(
            plugin("measuring", offer(Slot.BUDGET, "measuring", build=build, auto=False))
        )
        parts["config"]["budget"] = "measuring"
        driver = drive(make_engine(max_drafts=4, **parts))
    submit_mixed(driver.submit)
    assert facts(driver.run()) == plain[0]
    first, second = contexts
    assert first.fingerprint == second.fingerprint != ""
    assert (second.max_drafts, second.max_batch_tokens, second.verification) == (4, 64, "coupled")
    assert second.step_ms(2) == second.step_ms(2)
