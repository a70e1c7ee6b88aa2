"""The sampling flags that only commands which generate text have."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import frozen

from deepinfer_core.cli.options import SamplingArgs
from deepinfer_core.errors import RequestError, reason
from deepinfer_core.structured import StructuredOutput
from deepinfer_core.thinking import ThinkingLimit

Command = TypeVar("Command", bound=Callable[..., Any])


@frozen(kw_only=True)
class MoreSampling:
    """Further sampling flags.

    Attributes:
        values: those that were given, named and shaped as in ``SamplingParams``.
    """

    values: dict[str, Any]


def sampling_values(
    args: SamplingArgs, more: MoreSampling, defaults: dict[str, Any]
) -> dict[str, Any]:
    """Return arguments of ``SamplingParams``: defaults, then what was given."""
    return {**defaults, **args.given(), **more.values}


def _bias(entries: tuple[str, ...]) -> dict[int, float]:
    found: dict[int, float] = {}
    for entry in entries:
        token, _, bias = entry.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError as error:
            raise RequestError(
                f"--logit-bias {entry!r}: expected ID=NUMBER, such as 42=-100"
            ) from error
    return found


def _structured(text: str) -> StructuredOutput:
    """Read ``KIND=SOURCE``; a source that is JSON is taken as such, ``@FILE`` from a file."""
    kind, separator, source = text.partition("=")
    if not separator:
        raise RequestError(
            f"--structured {text!r}: expected KIND=SOURCE, such as regex=[0-9]+ or "
            "json_schema=@schema.json"
        )
    if source.startswith("@"):
        try:
            source = Path(source[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--structured cannot read {source[1:]}: {reason(error)}") from error
    if kind not in _TEXTS:
        with contextlib.suppress(ValueError):
            return StructuredOutput(kind=kind, source=json.loads(source))
    return StructuredOutput(kind=kind, source=source)


def _thinking_limit(text: str) -> ThinkingLimit:
    most, _, end = text.partition("=")
    try:
        ids = [int(token) for token in end.split(",")]
        return ThinkingLimit(max_tokens=int(most), end_token_ids=ids)
    except ValueError as error:
        raise RequestError(
            f"--thinking-limit {text!r}: expected N=ID or N=ID,ID, such as 200=151668"
        ) from error


_TEXTS = ("regex", "ebnf")
"""Kinds of grammars whose source is text, even if it looks like JSON."""

_OPTIONS = {
    "top_k": click.option("--top-k", type=int, help="Choose among this many tokens; 0 is off."),
    "top_p": click.option(
        "--top-p", type=float, help="Choose among the likeliest tokens of this total mass."
    ),
    "min_p": click.option(
        "--min-p", type=float, help="Drop tokens below this share of the likeliest one."
    ),
    "repetition_penalty": click.option(
        "--repetition-penalty", type=float, help="Above 1: avoid tokens that were there."
    ),
    "presence_penalty": click.option(
        "--presence-penalty", type=float, help="Subtract once from tokens of the output."
    ),
    "frequency_penalty": click.option(
        "--frequency-penalty", type=float, help="Subtract for each time a token was output."
    ),
    "logit_bias": click.option(
        "--logit-bias", multiple=True, metavar="ID=NUMBER", help="Add to a token's logit."
    ),
    "min_tokens": click.option("--min-tokens", type=int, help="Do not end before this many."),
    "stop": click.option("--stop", multiple=True, metavar="TEXT", help="End before this text."),
    "stop_token_ids": click.option(
        "--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token."
    ),
    "ignore_eos": click.option("--ignore-eos", is_flag=True, help="Go on after the end token."),
    "include_stop": click.option(
        "--include-stop", is_flag=True, help="Keep the stop text in the output."
    ),
    "structured": click.option(
        "--structured", metavar="KIND=SOURCE", help="Follow a grammar, such as regex=[0-9]+."
    ),
    "thinking_limit": click.option(
        "--thinking-limit",
        metavar="N=ID",
        help="After N tokens of thought, force the token that ends it.",
    ),
    "n": click.option("--n", type=int, help="How many outputs to make."),
    "logprobs": click.option(
        "--logprobs", type=int, metavar="K", help="With --json: report K alternatives per token."
    ),
    "prompt_logprobs": click.option(
        "--prompt-logprobs", type=int, metavar="K", help="The same for the prompt."
    ),
    "skip_special_tokens": click.option(
        "--special-tokens",
        "skip_special_tokens",
        flag_value=False,
        default=None,
        type=bool,
        help="Keep special tokens in the text.",
    ),
    "detokenize": click.option(
        "--no-text",
        "detokenize",
        flag_value=False,
        default=None,
        type=bool,
        help="With --json: token ids without text.",
    ),
}


def more_sampling_options(function: Command) -> Command:
    """Decorate a command with the further sampling flags; it gets ``more_sampling``."""

    @functools.wraps(function)
    def wrapper(*args: Any, **values: Any) -> Any:
        given = {name: values.pop(name) for name in _OPTIONS}
        # A flag that is not set, or an option that was not given; 0 is a value.
        unset = {"ignore_eos": False, "include_stop": False}
        chosen = {
            name: value
            for name, value in given.items()
            if value is not None and value != () and value is not unset.get(name)
        }
        if "logit_bias" in chosen:
            chosen["logit_bias"] = _bias(chosen["logit_bias"])
        if "structured" in chosen:
            chosen["structured"] = _structured(chosen["structured"])
        if "thinking_limit" in chosen:
            chosen["thinking_limit"] = _thinking_limit(chosen["thinking_limit"])
        return function(*args, more_sampling=MoreSampling(values=chosen), **values)

    decorated: Any = wrapper
    for option in reversed(_OPTIONS.values()):
        decorated = option(decorated)
    result: Command = decorated
    return result
