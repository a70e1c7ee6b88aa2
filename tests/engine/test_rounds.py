"""The round: chunking, mixing, overlap and preemption never change what comes out."""

import random
from typing import Any

import pytest

from deepinfer_core.requests import FinishReason


def submit_mixed(driver: Any, seed: Any = 0, count: Any = 12) -> Any:
    rng = random.Random(seed)
    for at in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 2, 5, 17, 40, 90]))]
        driver.submit(
            f"r{at}",
            prompt,
            max_tokens=rng.choice([1, 2, 9, 20]),
            temperature=rng.choice([0.0, 0.7, 30.0]),
            seed=at,
            n=rng.choice([1, 1, 1, 3]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            top_k=rng.choice([0, 5]),
        )


def tokens(results: Any) -> Any:
    return {name: [o.token_ids for o in result.outputs] for name, result in results.items()}


@pytest.fixture(scope="module")
def alone(tiny_model: Any) -> Any:
    """Every request by itself, one token row at a time."""
    from deepinfer_core.config import EngineConfig, EngineOptions
    from deepinfer_core.engine.engine import Engine

    class Recorder:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def submit(self, name: Any, prompt: Any, **params: Any) -> None:
            self.calls.append((name, prompt, params))

    recorder = Recorder()
    submit_mixed(recorder)
    options = EngineOptions(page_size=8, kv_pages=400, max_batch_tokens=5)
    config = EngineConfig(model=str(tiny_model), engine=options)
    results = {}
    with Engine.from_config(config, discover=False, environ={}) as engine:
        for name, prompt, params in recorder.calls:
            from deepinfer_core.requests import Request, SamplingParams

            params = {"ignore_eos": True, **params}
            engine.submit(
                Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**params))
            )
            while engine.has_work:
                engine.step()
            results[name] = engine.take_result(name)
    return tokens(results)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"max_batch_tokens": 3, "overlap": True},
        {"kv_pages": 16},
        {"kv_pages": 16, "overlap": True},
        {"max_sequences": 2},
        {"page_size": 32, "max_batch_tokens": 1000},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_company(
    make_engine: Any, drive: Any, alone: Any, options: Any
) -> None:
    driver = drive(make_engine(**options))
    submit_mixed(driver)
    assert tokens(driver.run()) == alone
    assert driver.engine.stats().kv_pages_used == 0


def test_tight_memory_preempts_and_changes_nothing(make_engine: Any, drive: Any) -> None:
    config = {"scheduler": "fcfs"}
    roomy, tight = (drive(make_engine(kv_pages=pages, config=config)) for pages in (200, 9))
    for driver in (roomy, tight):
        for at in range(6):
            driver.submit(f"r{at}", [at + 1, 2, 3], max_tokens=60)
    assert tokens(tight.run()) == tokens(roomy.run())
    assert tight.engine.stats().num_preemptions > 0


def test_a_request_that_arrives_while_others_run_starts_at_once(
    make_engine: Any, drive: Any
) -> None:
    driver = drive(make_engine())
    driver.submit("old", [1] * 10, max_tokens=50)
    for _ in range(5):
        driver.step()
    driver.submit("new", [2] * 10)
    assert any(delta.request_id == "new" for delta in driver.step())


def test_window_groups_give_pages_back(make_engine: Any, drive: Any, window_model: Any) -> None:
    driver = drive(make_engine(model=window_model, kv_pages=60))
    driver.submit("long", [7] * 100, max_tokens=200)
    most = 0
    while driver.engine.has_work:
        driver.step()
        usage = driver.engine.stats().pages
        most = max(most, usage[1].used)
    assert driver.results["long"].outputs[0].finish_reason is FinishReason.LENGTH
    window_pages = -(-(24 + 64) // 8) + 2
    assert most <= window_pages


def test_outputs_of_one_request_share_the_prompt(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine(max_batch_tokens=256))
    driver.submit("many", list(range(1, 97)), n=4, temperature=50.0, seed=3, max_tokens=4)
    driver.step()
    driver.step()
    shared = driver.engine.stats().pages[0].used
    results = driver.run()
    assert shared < 4 * (97 // 8)
    outputs = results["many"].outputs
    assert len({output.token_ids for output in outputs}) > 1
    assert driver.engine.stats().num_computed_tokens < 2 * 96 + 20


def test_overlap_takes_tokens_the_host_has_not_seen(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine(overlap=True))
    driver.submit("r", [1, 2, 3], max_tokens=5)
    assert driver.step() == []  # step 1 is drawn but not looked at
    assert len(driver.step()) == 1
    assert len(driver.run()["r"].outputs[0].token_ids) == 5
