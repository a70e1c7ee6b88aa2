"""What the fronts (offline, asynchronous, commands) use of an engine, and nothing more.

`deepinfer_core.engine.engine.Engine` has it, and so do the scripted engines of tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from deepinfer_core.interfaces.recipe import Recipe
from deepinfer_core.requests import Delta, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig


class TextCodec(Protocol):
    """The part of a tokenizer that fronts use."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        ...


class EngineSurface(Protocol):
    """An engine as its fronts see it. Every call comes from one thread.

    `tokenizer`, `chat` and `recipe` are pure conversions; a front may call them from other threads.
    """

    @property
    def config(self) -> EngineConfig:
        """What the engine was made from."""
        ...

    @property
    def tokenizer(self) -> TextCodec:
        """The model's tokenizer."""
        ...

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds, for arrivals and deadlines."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why the engine cannot go on, or None."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        ...

    @property
    def recipe(self) -> Recipe:
        """Conversations into prompts, and the wire formats of servers; raises an EngineError."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """Token ids of a conversation, ready to be answered."""
        ...

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """Start to compile what a request will need; may be called from any thread.

        What is returned ends when that is there, with a RequestError if it is bad; None if there is
        nothing to wait for. Raises a RequestError for what cannot be had at all.
        """
        ...

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it with a RequestError."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request at the next step; False if it is not alive."""
        ...

    def step(self, on_launch: Callable[[], None] | None = None) -> Sequence[Delta]:
        """Run one round and return what it added.

        ``on_launch`` is called at most once, just before a forward pass computes, during which
        other threads of this process may run; it may come from another thread and must not raise.
        """
        ...

    def take_result(self, request_id: str) -> RequestOutput | None:
        """The complete result, once, after the last delta of a request came out."""
        ...

    def stats(self) -> Any:
        """Counters of the engine."""
        ...

    def close(self) -> None:
        """Release everything; further calls raise EngineClosedError."""
        ...
