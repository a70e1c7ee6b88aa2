"""Bind one provider to every op, once; reasons against the others are kept for ``plan --ops``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import frozen

from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.kernels import OpFacts, OpProvider

OP_NAMES = (
    "linear",
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "rope",
    "silu_mul",
    "gelu_mul",
    "moe_gate",
    "moe_experts",
    "draw",
)
"""Ops of the core, the keys of ``reference.OPS``; known here without importing torch."""

OPTIONAL_OPS = ("decoder_layers", "draft_block", "latent_attention")
"""Ops that are used where somebody serves them; see ``DecoderLayers``, ``DraftBlock`` and
``LatentAttention`` of ``interfaces.kernels``."""


@frozen(kw_only=True)
class OpChoice:
    """What serves one op.

    Attributes:
        op: the op.
        provider: the winner.
        source: which kernel set offers it.
        refused: (set/provider, reason) of every other provider.
    """

    op: str
    provider: OpProvider
    source: str
    refused: tuple[tuple[str, str], ...]


def choose(
    sets: Iterable[tuple[str, Sequence[OpProvider]]], facts: OpFacts, ops: Sequence[str] = OP_NAMES
) -> tuple[OpChoice, ...]:
    """Pick a provider for each op: highest priority without an objection, then by name.

    Args:
        sets: (name of the kernel set, its providers).
        facts: what providers may judge by; with ``batch_invariant`` set, providers whose rows
            depend on each other are refused.
        ops: ops that must be served.

    Raises:
        CompositionError: an op nobody can serve, with every reason.
    """
    offers = sorted(
        ((source, provider) for source, providers in sets for provider in providers),
        key=lambda offer: (-offer[1].priority, offer[0], offer[1].name),
    )
    choices: list[OpChoice] = []
    problems = []
    for op in (*ops, *OPTIONAL_OPS):
        winner: tuple[str, OpProvider] | None = None
        refused = []
        for source, provider in offers:
            if provider.op != op:
                continue
            # Some objections are found by trying, which takes time: who lost anyway is not asked.
            reason = (
                "lower priority"
                if winner is not None
                else _foreign(provider, source, choices) or _objection(provider, facts)
            )
            if reason is None:
                winner = source, provider
            else:
                refused.append((f"{source}/{provider.name}", reason))
        if winner is None and op in OPTIONAL_OPS:
            continue
        if winner is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in refused) or "no kernel set has it"
            problems.append(f"{op}: {reasons}")
        else:
            choices.append(
                OpChoice(op=op, provider=winner[1], source=winner[0], refused=tuple(refused))
            )
    if problems:
        raise CompositionError("ops without a provider", problems)
    return tuple(choices)


def _objection(provider: OpProvider, facts: OpFacts) -> str | None:
    if facts.batch_invariant and not provider.batch_invariant:
        return "its rows depend on the batch, and batch_invariant is set"
    return provider.why_not(facts)


def _foreign(provider: OpProvider, source: str, choices: Sequence[OpChoice]) -> str | None:
    """Why a provider that takes handles of other ops cannot: another set makes them."""
    for choice in choices:
        if choice.op in provider.handles_of and choice.source != source:
            return f"{choice.op} is served by {choice.source}"
    return None


class OpTable:
    """The bound ops, as attributes: ``ops.linear``, ``ops.rms_norm``, ..."""

    def __init__(self, choices: Sequence[OpChoice], facts: OpFacts) -> None:
        self.choices = tuple(choices)
        for choice in choices:
            setattr(self, choice.op, choice.provider.build(facts))

    def optional(self, op: str) -> Any:
        """The implementation of an op of ``OPTIONAL_OPS``, or None."""
        return vars(self).get(op)

    def same_set(self, *ops: str) -> bool:
        """Whether one kernel set serves all of these ops and so knows the handles of each."""
        return len({choice.source for choice in self.choices if choice.op in ops}) == 1

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no op named {name!r} is bound")
