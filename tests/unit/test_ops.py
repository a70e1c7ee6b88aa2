"""The op table's choice of providers, and what the reference ops define."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.kernels import OpFacts, OpProvider
from deepinfer_core.ops.reference import OPS
from deepinfer_core.ops.table import OP_NAMES, OpTable, choose

FACTS = OpFacts(device_type="cpu", dtype="float32")


def provider(name: str, priority: int = 10, **fields: Any) -> OpProvider:
    return OpProvider(op="linear", name=name, build=lambda _: name, priority=priority, **fields)


def test_the_highest_priority_without_an_objection_wins_and_the_rest_have_reasons() -> None:
    offers = [
        provider("slow", 0),
        provider("elsewhere", 30, why_not=lambda facts: f"not on {facts.device_type}"),
        provider("good", 20),
    ]
    (choice,) = choose([("acme", offers)], FACTS, ["linear"])
    assert (choice.source, choice.provider.name) == ("acme", "good")
    assert choice.refused == (("acme/elsewhere", "not on cpu"), ("acme/slow", "lower priority"))


def test_ties_go_by_name_whatever_the_order() -> None:
    sets = [("b", [provider("x")]), ("a", [provider("z"), provider("y")])]
    for order in (sets, sets[::-1]):
        (choice,) = choose(order, FACTS, ["linear"])
        assert (choice.source, choice.provider.name) == ("a", "y")


def test_batch_invariance_refuses_providers_that_do_not_promise_it() -> None:
    facts = OpFacts(device_type="cpu", dtype="float32", batch_invariant=True)
    offers = [provider("fast", 30), provider("steady", 0, batch_invariant=True)]
    (choice,) = choose([("acme", offers)], facts, ["linear"])
    assert choice.provider.name == "steady"
    assert "depend on the batch" in choice.refused[0][1]
    assert choose([("acme", offers)], FACTS, ["linear"])[0].provider.name == "fast"


def test_ops_that_nobody_serves_are_listed_with_every_reason() -> None:
    offers = [provider("a", why_not=lambda _: "too old"), provider("b", why_not=lambda _: "tired")]
    with pytest.raises(CompositionError) as caught:
        choose([("acme", offers)], FACTS, ["linear", "rope"])
    assert caught.value.problems == (
        "linear: acme/a: too old; acme/b: tired",
        "rope: no kernel set has it",
    )


def test_objections_are_not_asked_of_providers_that_lost_anyway() -> None:
    def refuse(facts: OpFacts) -> str | None:
        raise AssertionError("trying a provider takes time")

    offers = [provider("best", 20), provider("other", 10, why_not=refuse)]
    assert choose([("acme", offers)], FACTS, ["linear"])[0].provider.name == "best"


def test_the_table_builds_each_winner_once_and_names_what_is_missing() -> None:
    table = OpTable(choose([("acme", [provider("one")])], FACTS, ["linear"]), FACTS)
    assert table.linear == "one"
    with pytest.raises(AttributeError, match="no op named 'conv' is bound"):
        _ = table.conv


def test_names_are_those_of_the_references() -> None:
    assert set(OP_NAMES) == set(OPS)


# ---------------------------------------------------------------------------- references


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rms_norm_by_definition() -> None:
    x, weight = randn(5, 7), randn(7, seed=1)
    expected = x / (x.pow(2).sum(-1, keepdim=True) / 7 + 1e-5).sqrt() * weight
    assert torch.allclose(OPS["rms_norm"]().run(x, weight, 1e-5), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs_as_complex_numbers(interleaved: bool) -> None:
    x, angles = randn(4, 3, 10), randn(4, 3, seed=1)
    found = OPS["rope"]().run(x, angles.cos(), angles.sin(), interleaved=interleaved)
    turned, rest = x[..., :6], x[..., 6:]
    first, second = (
        (turned[..., 0::2], turned[..., 1::2])
        if interleaved
        else (turned[..., :3], turned[..., 3:])
    )
    rotated = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    parts = (
        (found[..., 0:6:2], found[..., 1:6:2]) if interleaved else (found[..., :3], found[..., 3:6])
    )
    assert torch.allclose(parts[0], rotated.real)
    assert torch.allclose(parts[1], rotated.imag)
    assert torch.equal(found[..., 6:], rest)


def test_the_gate_orders_experts_and_the_lower_id_wins_ties() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    weights, ids = OPS["moe_gate"]().run(logits, 3, renormalise=False)
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert torch.allclose(weights, torch.softmax(logits, -1).gather(1, ids))
    weights, _ = OPS["moe_gate"]().run(logits, 3, renormalise=True)
    assert torch.allclose(weights.sum(-1), torch.ones(2))


def test_experts_are_weighted_feed_forwards() -> None:
    x, gate_up, down = randn(6, 4), randn(3, 10, 4, seed=1), randn(3, 4, 5, seed=2)
    weights, ids = OPS["moe_gate"]().run(randn(6, 3, seed=3), 2, renormalise=True)
    op = OPS["moe_experts"]()
    found = op.run(x, weights, ids, op.prepare(list(gate_up), list(down)))
    for row in range(6):
        expected = torch.zeros(4, dtype=torch.float64)
        for weight, expert in zip(weights[row], ids[row], strict=True):
            hidden = gate_up[expert] @ x[row]
            gate, up = hidden[:5], hidden[5:]
            expected += weight * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        assert torch.allclose(found[row], expected)
