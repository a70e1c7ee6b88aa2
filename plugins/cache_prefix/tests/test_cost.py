"""What a cache is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepinfer_core.errors import RequestError
from deepinfer_core.testing.contracts import CommandContract
from deepinfer_prefix.commands.cost import cost
from deepinfer_prefix.economics import Fleet, Prices, Tokens, read_trace


class TestCostCommand(CommandContract):
    component = "cost"
    failing_args = ("--trace", "no-such-file.jsonl")


PRICES = Prices(hit=0.02, miss=1.0, output=4.0)
FLEET = Fleet(prefill_rate=1.5e6, decode_rate=14_000)


def run(*args: str) -> Any:
    result = CliRunner().invoke(cost, [*args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(("hit_rate", "price"), [(0.96, 0.0592), (0.80, 0.216), (0, 1), (1, 0.02)])
def test_the_effective_input_price(hit_rate: float, price: float) -> None:
    assert PRICES.input_at(hit_rate) == pytest.approx(price)


def test_revenue_of_a_card_hour() -> None:
    assert FLEET.prefill_revenue(PRICES, 0.96) == pytest.approx(319.68)
    for output in (0.0, 4.0, 11.0):
        prices = Prices(hit=0.02, miss=1.0, output=output)
        assert FLEET.revenue(prices, 0.96) == pytest.approx((319.68 + 50.4 * output) / 2)
    assert FLEET.revenue(PRICES, 0.96) == pytest.approx(260.6, abs=0.05)
    assert FLEET.revenue(PRICES, 0.96) / 7.1 == pytest.approx(36.7, abs=0.05)


def test_cards_are_weighed() -> None:
    fleet = Fleet(prefill_rate=1e6, decode_rate=1e6, prefill_cards=1, decode_cards=3)
    prices = Prices(hit=1, miss=1, output=2)
    assert fleet.revenue(prices, 0.5) == pytest.approx((3600 + 3 * 7200) / 4)
    with pytest.raises(RequestError):
        Fleet(prefill_rate=1, decode_rate=1, prefill_cards=0, decode_cards=0).revenue(prices, 0.5)


def test_the_bill_of_counters() -> None:
    tokens = Tokens(prompt=2_000_000, cached=1_500_000, output=100_000)
    assert tokens.hit_rate == 0.75
    assert tokens.bill(PRICES) == pytest.approx(1.5 * 0.02 + 0.5 * 1 + 0.1 * 4)
    with pytest.raises(RequestError):
        Tokens(prompt=1, cached=2)


def test_a_trace_is_added_up(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"name": "request.submitted", "fields": {"request_id": "a"}},
        {
            "name": "request.finished",
            "fields": {"prompt_tokens": 100, "cached_tokens": 64, "output_tokens": 7},
        },
        {"prompt_tokens": 50, "cached_tokens": 0, "token_ids": [1, 2, 3]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*map(json.dumps, lines), "not json", "[1]", ""]))
    found = read_trace(path)
    assert found == Tokens(prompt=150, cached=64, output=10, requests=2)
    path.write_text("{}\n")
    with pytest.raises(RequestError, match="no finished request"):
        read_trace(path)


def test_the_command_reports_all_of_it(tmp_path: Path) -> None:
    args = ["--hit-rate", "0.96", "--prefill-rate", "1.5e6", "--decode-rate", "14000"]
    found = run(*args, "--per-dollar", "7.1")
    assert found["input_price"] == pytest.approx(0.0592)
    assert found["card_hour"]["revenue"] == pytest.approx(260.6, abs=0.05)
    assert found["card_hour"]["revenue_dollars"] == pytest.approx(36.7, abs=0.05)
    text = CliRunner().invoke(cost, args).output
    assert "0.0592" in text
    assert "260.6" in text
    assert "assumed" in text
    counted = run("--prompt-tokens", "100", "--cached-tokens", "80")
    assert counted["input_price"] == pytest.approx(0.216)


def test_the_command_computes_the_ratio_of_a_model(tmp_path: Path) -> None:
    from deepinfer_core.testing.tiny import write_tiny_model

    model = str(write_tiny_model(tmp_path))
    found = run("--hit-rate", "0.5", "--model", model, "--tokens", "64", "--tokens", "128")
    assert list(found["prefill_ratio"]) == ["64", "128"]
    assert all(1 < ratio < 2.1 for ratio in found["prefill_ratio"].values())


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--hit-rate", "0.5", "--prompt-tokens", "1", "--cached-tokens", "1"],
        ["--prompt-tokens", "5"],
        ["--prompt-tokens", "5", "--cached-tokens", "6"],
        ["--hit-rate", "0.5", "--prefill-rate", "1", "--cards", "one"],
        ["--hit-rate", "0.5", "--prefill-rate", "1", "--cards", "0:0"],
        ["--hit-rate", "0.5", "--prefill-rate", "1", "--cards", "-1:2"],
    ],
)
def test_what_makes_no_sense_is_refused(args: list[str]) -> None:
    result = CliRunner().invoke(cost, args)
    assert isinstance(result.exception, RequestError), result.output


@pytest.mark.parametrize("option", ["--hit-rate", "--price-hit", "--per-dollar", "--decode-rate"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(option: str, value: str) -> None:
    result = CliRunner().invoke(cost, ["--hit-rate", "0.5", option, value])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output
