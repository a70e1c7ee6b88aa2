"""What commands that run a model share: opening it, signals, and what they print of a result."""

from __future__ import annotations

import gc
import io
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import click

from deepinfer_core.cli.options import EngineArgs

if TYPE_CHECKING:
    from deepinfer_core.engine.llm import LLM
    from deepinfer_core.requests import Output, RequestOutput, TokenLogprob

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

EXIT_TERMINATED = 143
"""Exit status after SIGTERM, as shells report it."""


@attrs.frozen(kw_only=True)
class Session:
    """A model that is ready.

    Attributes:
        llm: the engine's offline front.
        model: the model as it was asked for.
    """

    llm: LLM
    model: str


@contextmanager
def open_session(engine_args: EngineArgs) -> Iterator[Session]:
    """Fetch the model if need be, build the engine, and close it at the end.

    SIGTERM ends the block like Ctrl-C does: running requests are ended, the engine is closed.
    """
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal cannot show, or cannot say, must not end a run.
            stream.reconfigure(errors="replace")
    with terminating():
        with starting():
            from deepinfer_core.engine.engine import Engine
            from deepinfer_core.engine.llm import LLM

            config, host = engine_args.open()
            path = locate(config.model)
            # The environment was read by `open`, once.
            engine = Engine.from_config(
                attrs.evolve(config, model=str(path)), environ={}, host=host
            )
        with LLM.over(engine) as llm:
            yield Session(llm=llm, model=config.model)


@contextmanager
def starting() -> Iterator[None]:
    """Collect no garbage meanwhile, and never look at what is alive then again.

    Imports and weights make a million objects that stay; looking through them for garbage takes
    longer than anything else of the start but torch's import, and a collection in mid-stream would
    do it again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def locate(model: str, *, offline: bool = False) -> Path:
    """Return where a model lies, fetching it first if need be, with a progress bar.

    Raises:
        PullError: there is no such model, or it cannot be fetched.
    """
    from deepinfer_core.hub import (
        TerminalProgress,
        default_cache_dir,
        find_model,
        hugging_face_home,
    )

    return find_model(
        model,
        default_cache_dir(os.environ),
        offline,
        hf_home=hugging_face_home(os.environ),
        progress=TerminalProgress(sys.stderr),
    )


@contextmanager
def terminating() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that ``finally`` blocks run."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(EXIT_TERMINATED)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def show(text: str) -> None:
    """Write a piece of a model's text to stdout, at once.

    On a terminal, control characters are left out: a model must not move the cursor or change the
    clipboard.
    """
    click.echo(_CONTROL.sub("", text) if sys.stdout.isatty() else text, nl=False)


def record(result: RequestOutput, *, model: str, seed: int | None) -> dict[str, Any]:
    """Return a result as the JSON object that ``generate --json`` documents.

    Args:
        result: a complete result.
        model: the model as it was asked for.
        seed: what makes the result come again.
    """
    first = result.outputs[0] if result.outputs else None
    found: dict[str, Any] = {
        "model": model,
        "text": first.text if first else "",
        "token_ids": list(first.token_ids) if first else [],
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.cached_tokens,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "finish_reason": str(first.finish_reason) if first else "error",
        "stop_reason": first.stop_reason if first else None,
        "seed": seed,
        "exact": result.exact,
        "invariant": result.invariant,
        "ttft_s": result.ttft_s,
        "decode_tokens_per_s": decode_speed(result),
        "error": error_of(result),
    }
    if first and first.logprobs:
        found["logprobs"] = [_logprob(entry) for entry in first.logprobs]
    if result.prompt_logprobs:
        found["prompt_logprobs"] = [entry and _logprob(entry) for entry in result.prompt_logprobs]
    if len(result.outputs) > 1:
        found["outputs"] = [_output(output) for output in result.outputs]
    return found


def decode_speed(result: RequestOutput) -> float | None:
    """Return tokens per second after the first token; None if there is no second one."""
    if result.ttft_s is None or result.total_s <= result.ttft_s:
        return None
    later = sum(max(0, len(output.token_ids) - 1) for output in result.outputs)
    return later / (result.total_s - result.ttft_s) if later else None


def error_of(result: RequestOutput) -> str | None:
    """Return why a request failed, as a whole or in one of its outputs."""
    if result.error is not None:
        return result.error
    return next((output.error for output in result.outputs if output.error is not None), None)


def _output(output: Output) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": str(output.finish_reason),
        "stop_reason": output.stop_reason,
    }
    if output.logprobs:
        found["logprobs"] = [_logprob(entry) for entry in output.logprobs]
    return found


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": _finite(entry.logprob),
        "rank": entry.rank,
        "top": [[token_id, _finite(logprob)] for token_id, logprob in entry.top],
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity: null stands for what is impossible."""
    return value if math.isfinite(value) else None
