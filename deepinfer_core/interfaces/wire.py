"""Wire formats: request bodies into generations, deltas of the engine into response bodies.

A server knows HTTP, a recipe knows what its clients and its model say. They meet here. A recipe's
`formats` are mounted at their ``path``; for each body that arrives, a server does

1. ``exchange = format.read(body, context)``: pure conversion, in a thread, as it tokenises;
2. ``reply = exchange.reply(identity, created_s)``;
3. starts one engine request for every one of ``exchange.generations`` (there may be none: a count
   of tokens is answered by `Reply.body` at once);
4. streaming: sends `Reply.start`, then `Reply.push` of every delta, and when all ended
   `Reply.finish`; otherwise pushes the deltas all the same and sends `Reply.body` after
   `Reply.finish`;
5. aborts a generation as soon as `Reply.wants` says that its further tokens are not wanted;
6. answers a failure before the first byte with ``format.error(Fault.of(error))``, and one in the
   middle of a stream with the events of `Reply.fail`, after which nothing follows.

Nothing here does I/O, reads a clock or draws random numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen

from deepinfer_core.errors import AdmissionError, ProtocolError, RequestError
from deepinfer_core.requests import Delta, RequestOutput, SamplingParams


@frozen(kw_only=True)
class Generation:
    """What one engine request is made from.

    Attributes:
        prompt_token_ids: the rendered prompt.
        params: how to choose tokens, what the output must follow, how long the model may think;
            ``n`` outputs.
        cache_salt: requests with different salts never share cached prefixes.
        cache_retain_s: seconds for which stores do not evict what it computes for the room of
            others.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    cache_retain_s: float | None = None


@frozen(kw_only=True)
class ServerEvent:
    """One server-sent event.

    Attributes:
        data: a JSON object, or a word such as ``[DONE]``.
        name: the event's name, "" for events that have none.
    """

    data: Mapping[str, Any] | str
    name: str = ""

    def encode(self) -> bytes:
        """Return the event as it goes over the wire."""
        data = self.data if isinstance(self.data, str) else to_json(self.data)
        name = f"event: {self.name}\n" if self.name else ""
        return f"{name}data: {data}\n\n".encode()


to_json: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False
).encode
"""Serialise a body: compact, no ASCII folding, no NaN (a ValueError)."""


@frozen(kw_only=True)
class Fault:
    """What went wrong, before a format gives it its shape.

    Attributes:
        status: HTTP status.
        message: for the client.
        param: the field of the body that is to blame, if one is.
        code: a word for programs, such as ``model_not_found``, or None.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Name the status of an error: 400 for refusals, 429 for a full queue, 500 for the rest.

        The message of an error that was not raised on purpose stays inside.
        """
        if isinstance(error, ProtocolError):
            return cls(status=error.status, message=str(error), param=error.param, code=error.code)
        if isinstance(error, AdmissionError) and error.busy:
            return cls(status=429, message=str(error), code="overloaded")
        if isinstance(error, RequestError):
            return cls(status=400, message=str(error))
        return cls(status=500, message="the engine failed; see its log", code="internal_error")


@frozen(kw_only=True)
class StoredResponse:
    """What a server keeps of a response, so that a later request can continue it.

    Attributes:
        identity: the response's full id.
        body: the response object as it was sent, brought up to date by `Reply.stored`.
        input_items: the whole conversation before the response, each item with an ``id``.
    """

    identity: str
    body: Mapping[str, Any]
    input_items: tuple[Mapping[str, Any], ...]


def _nothing_stored(identity: str) -> StoredResponse | None:
    return None


@frozen(kw_only=True)
class ReadContext:
    """What a format may ask while it reads a body.

    Attributes:
        stored: response id -> what was kept of it, or None; may be called from any thread.
        cache_salt: put into every generation.
    """

    stored: Callable[[str], StoredResponse | None] = _nothing_stored
    cache_salt: str = ""


class Reply(Protocol):
    """Outputs of one exchange on their way into a response. Owned by one task.

    The response depends on the tokens only, not on how many of them a delta carries.
    """

    @property
    def identity(self) -> str:
        """The response's full id."""
        ...

    @property
    def failure(self) -> Fault | None:
        """What failed, once a delta said so; then `finish` gives the events of `fail`.

        A server that does not stream answers with ``format.error(reply.failure)``.
        """
        ...

    def start(self) -> Sequence[ServerEvent]:
        """Events before the first token; called once, also when nobody streams."""
        ...

    def push(self, delta: Delta, generation: int = 0) -> Sequence[ServerEvent]:
        """Events that a delta of a generation (its place in ``generations``) brings.

        Deltas after the end of their output are ignored.
        """
        ...

    def wants(self, generation: int = 0) -> bool:
        """Whether any output of a generation still goes on; if not, abort it and push no more."""
        ...

    def finish(self, results: Sequence[RequestOutput | None]) -> Sequence[ServerEvent]:
        """Events after the last token.

        Args:
            results: of every generation, for what deltas do not say (cached tokens); None for one
                that was aborted because it was not wanted any more and left none.
        """
        ...

    def fail(self, fault: Fault) -> Sequence[ServerEvent]:
        """Events that end a stream which cannot go on. Nothing may be pushed afterwards."""
        ...

    def body(self) -> Mapping[str, Any]:
        """The complete response; before `finish` and after `fail`, what is known of it."""
        ...

    def stored(self) -> StoredResponse | None:
        """What to keep, or None for formats without state and requests with ``store: false``."""
        ...


class Exchange(Protocol):
    """One request body, understood."""

    @property
    def model(self) -> str:
        """The model that the client named."""
        ...

    @property
    def stream(self) -> bool:
        """Whether the client wants events."""
        ...

    @property
    def background(self) -> bool:
        """Whether the client wants the response's id at once and will come back for the rest."""
        ...

    @property
    def generations(self) -> Sequence[Generation]:
        """What to ask of the engine; empty if the answer is known already."""
        ...

    @property
    def ignored(self) -> Sequence[str]:
        """Fields of the body that have no effect."""
        ...

    def reply(self, identity: str, created_s: int) -> Reply:
        """Begin the response.

        Args:
            identity: letters and digits, unique; the format puts its prefix before them.
            created_s: seconds since the epoch.
        """
        ...


class WireFormat(Protocol):
    """How one kind of client speaks. Pure conversion, safe to use from several threads."""

    @property
    def name(self) -> str:
        """For logs, metrics and lists: ``openai.chat``."""
        ...

    @property
    def path(self) -> str:
        """Where a server takes its bodies: ``/v1/chat/completions``."""
        ...

    def read(self, body: bytes, context: ReadContext) -> Exchange:
        """Understand a request.

        Raises:
            RequestError: it is wrong, or asks for what cannot be done; often a `ProtocolError`.
        """
        ...

    def error(self, fault: Fault) -> Mapping[str, Any]:
        """The body of an answer with ``fault.status``, in the shape that clients expect."""
        ...
