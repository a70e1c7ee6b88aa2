"""A Jinja sandbox whose programs come to an end.

Jinja's own sandbox keeps a template away from Python, but lets it loop and grow for as long as it
likes. Here the syntax tree is rewritten before it is compiled: every loop counts its turns, and
operators that make long texts check the length first. Formatting and padding filters are not
covered, so a template can still waste memory if it sets out to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 32_000_000
MAX_TURNS = 2_000_000
_MAX_POWER = 1000
_BUDGET = "_turns_left"
_COUNT, _CONCATENATE = "_count_turns", "_concatenate"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with bounded operators; templates must pass through ``bounded`` first."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters[_COUNT] = _count_turns
        self.filters[_CONCATENATE] = _concatenate

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Refuse results that only a runaway template asks for."""
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise jinja2.TemplateError("it raises a number to too high a power")
        if operator == "*":
            _check_length(_length(left) * _times(right) + _length(right) * _times(left))
        if operator == "+":
            _check_length(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)


def bounded(template: nodes.Template) -> nodes.Template:
    """Rewrite a parsed template so that loops and concatenations are counted."""
    assert template.environment is not None  # set by the parser
    found = _Counting().visit(template)
    assert isinstance(found, nodes.Template)
    found.set_environment(template.environment)
    return found


def fresh_budget() -> dict[str, Any]:
    """Return the variables that one rendering of a bounded template needs."""
    return {_BUDGET: [MAX_TURNS]}


def join_bounded(chunks: Iterable[str]) -> str:
    """Join what a template writes, up to a limit.

    Raises:
        jinja2.TemplateError: it writes too much.
    """
    parts: list[str] = []
    size = 0
    for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        _check_length(size)
    return "".join(parts)


class _Counting(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 Jinja's naming
        self.generic_visit(node)
        node.iter = _filter(node.iter, _COUNT)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802 Jinja's naming
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), _CONCATENATE)


def _filter(value: nodes.Node, name: str) -> nodes.Filter:
    # Jinja declares less precise types for the children of a node than for its constructor.
    return nodes.Filter(cast("nodes.Expr", value), name, [], [], None, None)


@jinja2.pass_context
def _count_turns(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = context[_BUDGET]
    for item in items:
        budget[0] -= 1
        if budget[0] < 0:
            raise jinja2.TemplateError(f"its loops turn more than {MAX_TURNS:,} times")
        yield item


@jinja2.pass_context
def _concatenate(context: jinja2.runtime.Context, items: list[Any]) -> str:
    del context  # asked for only so that Jinja does not run this at compile time
    return join_bounded(map(str, items))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _times(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise jinja2.TemplateError(f"it makes a text of more than {MAX_CHARACTERS:,} characters")


def _is_small(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) < _MAX_POWER
