"""Sampling parameters as clients of the OpenAI protocols send them, with the usual extras."""

from __future__ import annotations

from typing import Any

from deepinfer_core.errors import ProtocolError, RequestError
from deepinfer_core.requests import MAX_LOGPROBS, SamplingParams
from deepinfer_recipe.conversation import Conversation, ThinkingBudget
from deepinfer_recipe.wire.fields import Fields

MAX_STOPS = 16
"""Stop strings of one request."""

MAX_STOP_LENGTH = 1024
"""Characters of one stop string."""

_EXTRAS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")


def stop_strings(fields: Fields, name: str = "stop") -> tuple[str, ...]:
    """Return stop strings: one or a list, none empty, not too many and not too long.

    Raises:
        ProtocolError: they are not.
    """
    found = fields.get(name)
    if found is None:
        return ()
    stops = [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.error(name, "must be a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS:
        raise fields.error(name, f"has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_LENGTH:
        raise fields.error(
            name, f"has a string of {longest} characters; at most {MAX_STOP_LENGTH} are allowed"
        )
    return tuple(stops)


def read_common(fields: Fields) -> dict[str, Any]:
    """Return what every OpenAI format shares, as arguments of `SamplingParams`."""
    values: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 2, 1.0),
        "top_p": fields.number("top_p", 0, 1, 1.0) or 1e-9,
    }
    return values | read_extras(fields)


def read_extras(fields: Fields) -> dict[str, Any]:
    """Return the parameters that servers of open models add."""
    return {name: fields.get(name) for name in _EXTRAS if fields.has(name)}


def read_penalties(fields: Fields) -> dict[str, Any]:
    """Return penalties, bias and seed."""
    values: dict[str, Any] = {
        "presence_penalty": fields.number("presence_penalty", -2, 2, 0.0),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2, 0.0),
        "seed": fields.integer("seed", -(2**63), 2**64 - 1),
    }
    bias = fields.get("logit_bias")
    if bias is not None:
        if not isinstance(bias, dict):
            raise fields.error("logit_bias", "must be an object of token ids and numbers")
        try:
            values["logit_bias"] = {int(token): value for token, value in bias.items()}
        except ValueError as error:
            raise fields.error("logit_bias", "its keys must be token ids") from error
    return values


def read_budget(fields: Fields | None, name: str = "budget_tokens") -> ThinkingBudget | None:
    """Return how much an answer may be thought about, if a field says so."""
    found = None if fields is None else fields.integer(name, 0)
    if fields is None or found is None:
        return None
    return ThinkingBudget(max_tokens=found, field=fields.path(name))


def unused_budget(conversation: Conversation, params: SamplingParams) -> tuple[str, ...]:
    """Return the field of a budget that has no effect, as the model does not think."""
    budget = conversation.budget
    return () if budget is None or params.thinking_limit is not None else (budget.field,)


def top_logprobs(fields: Fields) -> int | None:
    """Return how many alternatives a chat asks for, None for no logprobs."""
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise fields.error("top_logprobs", "needs logprobs: true")
    return (top or 0) if wanted else None


def params(**values: Any) -> SamplingParams:
    """Return checked parameters. A reply makes its text from token ids, so the engine need not.

    Raises:
        ProtocolError: a value is out of range.
    """
    try:
        return SamplingParams(detokenize=False, **values)
    except RequestError as error:
        raise ProtocolError(str(error), param=str(error).split(maxsplit=1)[0]) from error
