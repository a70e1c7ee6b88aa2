"""The oracle is right, agrees with engines of several compositions, and notices a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
import torch

from deepinfer_core.checkpoint.safetensors import SafetensorsCheckpoint
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.interfaces.attention import AttentionParams
from deepinfer_core.models.decoder import DecoderFamily
from deepinfer_core.requests import Delta, FinishReason, Request
from deepinfer_core.testing.oracle import Oracle, assert_lossless, dense_attention, run_to_end
from deepinfer_core.testing.tiny import write_tiny_model

PROMPTS = [
    [Random(at).randrange(256) for _ in range(length)] for at, length in enumerate((1, 9, 40))
]


@pytest.fixture(scope="module", params=["plain", "window"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    window: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    options = window if request.param == "window" else {}
    return write_tiny_model(tmp_path_factory.mktemp(request.param), **options)


@pytest.fixture
def make_engine(model_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        full = EngineOptions(**{"page_size": 8, "kv_pages": 100, **options})
        config = EngineConfig(model=str(model_path), dtype="float32", engine=full)
        engines.append(Engine.from_config(config, discover=False, environ={}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Oracle:
    return Oracle.of(SafetensorsCheckpoint(model_path), DecoderFamily())


# ---------------------------------------------------------------------------- dense attention


def inputs(rows: int, seen: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, 4, 8, generator=generator)
    k, v = torch.randn(2, seen, 2, 8, generator=generator)
    return q, k, v


@pytest.mark.parametrize(("window", "visible_from"), [(0, 0), (3, 0), (0, 2), (4, 3)])
def test_dense_attention_agrees_with_torch(window: int, visible_from: int) -> None:
    q, k, v = inputs(6, 6)
    at = torch.arange(6)
    mask = (at <= at[:, None]) & (at >= visible_from)
    if window:
        mask &= at > at[:, None] - window
    rows = range(visible_from, 6)
    queries, keys, values = (side.double().transpose(0, 1)[None] for side in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=0.3, enable_gqa=True
    )[0].transpose(0, 1)
    found = dense_attention(
        q[visible_from:],
        k,
        v,
        positions=rows,
        params=AttentionParams(scale=0.3, window=window),
        visible_from=visible_from,
    )
    torch.testing.assert_close(found, expected[visible_from:])


def test_a_sink_is_a_key_without_a_value() -> None:
    q, k, v = inputs(1, 3)
    q[:] = 0  # every score is 0, as is the sink: four equal shares, one of them lost
    params = AttentionParams(scale=1.0, sinks=torch.zeros(4))
    found = dense_attention(q, k, v, positions=[2], params=params)
    expected = v.double().sum(0).repeat_interleave(2, 0) / 4
    torch.testing.assert_close(found[0], expected)


def test_softcap_flattens_scores() -> None:
    q, k, v = inputs(1, 3)
    params = AttentionParams(scale=100.0, softcap=1e-9)
    found = dense_attention(q, k, v, positions=[2], params=params)
    torch.testing.assert_close(found[0], v.double().mean(0).repeat_interleave(2, 0))


# ------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"overlap": False},
        {"max_batch_tokens": 7},
        {"max_sequences": 1},
        {"kv_pages": 9},
        {"batch_invariant": False},
    ],
    ids=str,
)
def test_engines_agree_with_the_oracle(
    make_engine: Callable[..., Engine], oracle: Oracle, options: dict[str, Any]
) -> None:
    assert_lossless(make_engine(**options), PROMPTS, oracle=oracle, max_tokens=12)


def test_the_oracle_stops_at_a_stop_id(oracle: Oracle) -> None:
    tokens = oracle.generate(PROMPTS[1], 12)
    assert len(tokens) == 12
    end = tokens.index(tokens[4]) + 1
    assert oracle.generate(PROMPTS[1], 12, stop_ids=[tokens[4]]) == tokens[:end]


class _Model:
    """Gives the same logits for everything."""

    def __init__(self, logits: list[float]) -> None:
        self._logits = torch.tensor(logits)

    def logits(self, token_ids: Any, rows: Any = None) -> torch.Tensor:
        return self._logits.expand(len(rows), -1)


def test_the_lowest_id_wins_ties() -> None:
    oracle = Oracle(None)  # type: ignore[arg-type]
    oracle.logits = _Model([0.0, 2.0, 1.0, 2.0]).logits  # type: ignore[method-assign]
    assert oracle.generate([7], 3) == [1, 1, 1]


class _Scripted:
    """An engine that says what it is told to."""

    def __init__(self, deltas: list[Delta]) -> None:
        self._deltas = deltas

    def submit(self, request: Request) -> None:
        pass

    @property
    def has_work(self) -> bool:
        return bool(self._deltas)

    def step(self, on_launch: object = None) -> list[Delta]:
        return [self._deltas.pop(0)]


def delta(*tokens: int, end: FinishReason | None = None, error: str | None = None) -> Delta:
    return Delta(request_id="r", token_ids=tokens, finish_reason=end, error=error)


REQUEST = Request(request_id="r", prompt_token_ids=(1,))


def test_tokens_of_all_deltas_are_collected() -> None:
    engine = _Scripted([delta(1), delta(2, 3), delta(end=FinishReason.LENGTH)])
    assert run_to_end(engine, [REQUEST]) == {"r": [1, 2, 3]}


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ([delta(1)], "have not ended"),
        ([delta(end=FinishReason.ERROR, error="row 3 is not finite")], "row 3 is not finite"),
    ],
)
def test_requests_that_do_not_end_well_are_noticed(deltas: list[Delta], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_to_end(_Scripted(deltas), [REQUEST])


class _WrongOnce:
    """An engine with one token changed on its way out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._left = 5

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, on_launch: object = None) -> list[Delta]:
        deltas = []
        for item in self._engine.step():
            self._left -= len(item.token_ids)
            if item.token_ids and -len(item.token_ids) < self._left <= 0:
                self._left = -1000
                item = attrs.evolve(item, token_ids=(*item.token_ids[:-1], 3))
            deltas.append(item)
        return deltas


def test_one_wrong_token_is_noticed(make_engine: Callable[..., Engine], oracle: Oracle) -> None:
    with pytest.raises(AssertionError, match="the engine gives"):
        assert_lossless(_WrongOnce(make_engine()), PROMPTS, oracle=oracle, max_tokens=12)


def test_a_page_left_in_use_is_noticed(make_engine: Callable[..., Engine], oracle: Oracle) -> None:
    engine = make_engine()
    cache = engine._parts.cache
    cache.open(10_000, (1, 2))
    assert cache.reserve(10_000, 2)
    with pytest.raises(AssertionError, match="pages are in use"):
        assert_lossless(engine, PROMPTS[:1], oracle=oracle, max_tokens=2)
