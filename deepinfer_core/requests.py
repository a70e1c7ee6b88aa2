"""What goes into the engine and what comes out: frozen values that users touch.

`SamplingParams` says how to choose tokens, `Request` adds the prompt and its place in the queue;
`Delta` is what one step adds to one output, `RequestOutput` the complete result. Everything is
checked when it is made, so that a request that exists can be scheduled. What depends on a model
(vocabulary, context length) is checked by `Request.check_vocabulary` and by admission.

This module imports neither torch nor numpy.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

from deepinfer_core import values
from deepinfer_core.errors import RequestError
from deepinfer_core.structured import StructuredOutput
from deepinfer_core.thinking import ThinkingLimit

MAX_LOGPROBS = 20
"""Most alternatives that may be asked for at one position."""

MAX_OUTPUTS = 128
"""Most outputs (``n``) of one request."""

MAX_SEED = 2**64 - 1
"""Largest seed; negative seeds down to -2**63 are read as their two's complement."""


class FinishReason(enum.StrEnum):
    """Why an output ended."""

    STOP = "stop"
    """A stop string, a stop id or the model's end token."""
    LENGTH = "length"
    """``max_tokens`` reached, or the context is full."""
    ABORT = "abort"
    """Cancelled by its owner."""
    ERROR = "error"
    """Failed; ``error`` says what and where."""
    DEADLINE = "deadline"
    """Its deadline passed."""


# ------------------------------------------------------------------------------ conversion


def _prompt_ids(value: Any) -> tuple[int, ...]:
    return values.token_ids("prompt_token_ids", value)


def _stop_ids(value: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values.token_ids("stop_token_ids", value)))


def _stop_strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    allowed = "a string or a sequence of strings, none of them empty"
    found = values.items("stop", value, allowed)
    if not all(isinstance(item, str) and item for item in found):
        raise values.refuse("stop", value, allowed)
    return tuple(dict.fromkeys(found))


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    allowed = "a mapping from token id to a number from -100 to 100"
    found: dict[int, float] = {}
    for pair in values.items("logit_bias", pairs, allowed):
        try:
            token, bias = pair
        except (TypeError, ValueError):
            raise values.refuse("logit_bias", value, allowed) from None
        token_id = values.integer("logit_bias: a token id", token, 0)
        if token_id in found:
            raise RequestError(f"logit_bias names token {token_id} twice; keep one of them")
        found[token_id] = values.bounded(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
    return tuple(sorted(found.items()))


# ------------------------------------------------------------------------------- parameters


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How to choose the tokens of a request.

    Every value is checked when the object is made; a `RequestError` names the field, the value
    and what is allowed. Order of application, as `deepinfer_core.sampling` does it: penalties,
    bias, bans and masks, temperature, then top-k, top-p and min-p.

    Args:
        max_tokens: most new tokens; None means until the context is full. 0 computes no new
            token and needs ``prompt_logprobs``.
        min_tokens: no end token and no stop id before this many new tokens.
        temperature: 0 is greedy: the largest logit, the lowest id among equals.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the smallest set of most likely tokens whose mass reaches this; 1 is off.
        min_p: drop tokens less likely than this share of the most likely one; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in the
            prompt or the output; 1 is off.
        presence_penalty: subtracted once from tokens seen in the output; -2 to 2.
        frequency_penalty: subtracted per occurrence in the output; -2 to 2.
        logit_bias: token id -> number added to its logit, -100 to 100; kept as sorted pairs.
        stop: strings that end the output; one string or several.
        stop_token_ids: ids that end the output.
        ignore_eos: go on after the model's end token.
        include_stop: leave the stop string in the text.
        seed: random numbers of this request, 64 bits; None lets the engine draw one.
        n: how many outputs to make.
        logprobs: how many alternatives to report beside each new token, at most 20;
            0 reports the chosen token only, None nothing.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: whether there is a text at all; False is for whoever makes it from the token ids
            anyway, and leaves nothing in which ``stop`` could be found.
        structured: a grammar that the output must follow; None for free text.
        thinking_limit: how long the model may think; None for as long as it likes. While a grammar
            holds, it alone decides.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_bias)
    stop: tuple[str, ...] = attrs.field(default=(), converter=_stop_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_stop_ids)
    ignore_eos: bool = False
    include_stop: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured: StructuredOutput | None = None
    thinking_limit: ThinkingLimit | None = None

    def __attrs_post_init__(self) -> None:
        """Check and normalise every field, then the combinations."""
        self._check_counts()
        self._check_shape()
        self._check_penalties()
        for field in ("ignore_eos", "include_stop", "skip_special_tokens", "detokenize"):
            values.flag(field, getattr(self, field))
        structured: object = self.structured
        if structured is not None and not isinstance(structured, StructuredOutput):
            raise values.refuse("structured", structured, "a StructuredOutput or None")
        limit: object = self.thinking_limit
        if limit is not None and not isinstance(limit, ThinkingLimit):
            raise values.refuse("thinking_limit", limit, "a ThinkingLimit or None")
        self._check_combinations()

    def _put(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _check_counts(self) -> None:
        if self.max_tokens is not None:
            self._put("max_tokens", values.integer("max_tokens", self.max_tokens, 0))
        self._put("min_tokens", values.integer("min_tokens", self.min_tokens, 0))
        self._put("top_k", values.integer("top_k", self.top_k, 0))
        self._put("n", values.integer("n", self.n, 1, MAX_OUTPUTS))
        if self.seed is not None:
            self._put("seed", values.integer("seed", self.seed, -(2**63), MAX_SEED))
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None:
                self._put(field, values.integer(field, value, 0, MAX_LOGPROBS))

    def _check_shape(self) -> None:
        allowed = "a number >= 0 (0 is greedy)"
        temperature = values.number("temperature", self.temperature, allowed)
        if temperature < 0:
            raise values.refuse("temperature", self.temperature, allowed)
        self._put("temperature", temperature)
        allowed = "a number > 0 and <= 1 (1 is off; temperature=0 is greedy)"
        top_p = values.number("top_p", self.top_p, allowed)
        if not 0 < top_p <= 1:
            raise values.refuse("top_p", self.top_p, allowed)
        self._put("top_p", top_p)
        self._put("min_p", values.bounded("min_p", self.min_p, 0.0, 1.0))

    def _check_penalties(self) -> None:
        allowed = "a number > 0 (1 is off)"
        penalty = values.number("repetition_penalty", self.repetition_penalty, allowed)
        if penalty <= 0:
            raise values.refuse("repetition_penalty", self.repetition_penalty, allowed)
        self._put("repetition_penalty", penalty)
        for field in ("presence_penalty", "frequency_penalty"):
            self._put(field, values.bounded(field, getattr(self, field), -2.0, 2.0))

    def _check_combinations(self) -> None:
        if self.stop and not self.detokenize:
            raise RequestError("stop needs the text; leave detokenize on, or use stop_token_ids")
        limit = self.thinking_limit
        if limit is not None and self.min_tokens:
            banned = set(limit.end_token_ids).intersection(self.stop_token_ids)
            if banned:
                raise RequestError(
                    f"stop_token_ids has {min(banned)}, which thinking_limit forces and min_tokens "
                    "forbids; leave one of the three out"
                )
        if self.max_tokens is None:
            return
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens must be at least 1, not 0; 0 is only for scoring a prompt, "
                "which needs prompt_logprobs"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def effective_seed(self, default: int) -> int:
        """Return the seed as an unsigned 64-bit number.

        Args:
            default: what the engine drew, used when the request names no seed.
        """
        return (default if self.seed is None else self.seed) & MAX_SEED


# ---------------------------------------------------------------------------------- request


@attrs.frozen(kw_only=True)
class Request:
    """A prompt, how to continue it, and its place in the queue.

    Args:
        request_id: unique among the requests that are alive in an engine.
        prompt_token_ids: at least one token id.
        params: how to choose tokens.
        priority: lower runs first.
        arrival_s: when it came, by the engine's clock.
        deadline_s: when it ends at the latest, by the same clock; None for never.
        cache_salt: requests with different salts never share cached prefixes.
        exact: use no state that was recovered approximately, whatever the cache is set to do.
        cache_expire_after_s: seconds after which nobody finds what this request computed in a
            cache, used or not; None = as caches and stores are configured. See
            ``deepinfer_core.interfaces.cache.Keep``.
        cache_retain_s: seconds for which stores do not evict it for the room of others.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = attrs.field(converter=_prompt_ids)
    params: SamplingParams = attrs.field(factory=SamplingParams)
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    cache_salt: str = ""
    exact: bool = False
    cache_expire_after_s: float | None = None
    cache_retain_s: float | None = None

    def __attrs_post_init__(self) -> None:
        """Check and normalise every field."""
        if not values.text("request_id", self.request_id):
            raise values.refuse("request_id", self.request_id, "a string that is not empty")
        if not self.prompt_token_ids:
            raise RequestError(
                f"request {self.request_id!r}: prompt_token_ids is empty; "
                "give at least one token (most models start with one of their own)"
            )
        params: object = self.params
        if not isinstance(params, SamplingParams):
            raise values.refuse("params", params, "SamplingParams")
        priority = values.integer("priority", self.priority, -(2**31), 2**31 - 1)
        object.__setattr__(self, "priority", priority)
        object.__setattr__(
            self,
            "arrival_s",
            values.number("arrival_s", self.arrival_s, "a finite number of seconds"),
        )
        if self.deadline_s is not None:
            allowed = "a finite number of seconds or None"
            object.__setattr__(
                self, "deadline_s", values.number("deadline_s", self.deadline_s, allowed)
            )
        values.text("cache_salt", self.cache_salt)
        values.flag("exact", self.exact)
        for field in ("cache_expire_after_s", "cache_retain_s"):
            self._check_seconds(field)

    def _check_seconds(self, field: str) -> None:
        value, allowed = getattr(self, field), "a number of seconds >= 0 or None"
        if value is None:
            return
        seconds = values.number(field, value, allowed)
        if seconds < 0:
            raise values.refuse(field, value, allowed)
        object.__setattr__(self, field, seconds)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have.

        Args:
            vocab_size: number of token ids of the model.

        Raises:
            RequestError: naming the field, the place, the id and the vocabulary's size.
        """
        fields = {
            "prompt_token_ids": self.prompt_token_ids,
            "stop_token_ids": self.params.stop_token_ids,
            "logit_bias": tuple(token for token, _ in self.params.logit_bias),
        }
        if self.params.thinking_limit is not None:
            fields["thinking_limit"] = self.params.thinking_limit.token_ids
        for field, ids in fields.items():
            if ids and max(ids) >= vocab_size:
                at = next(at for at, token_id in enumerate(ids) if token_id >= vocab_size)
                raise RequestError(
                    f"request {self.request_id!r}: {field} has token {ids[at]} (entry {at}), but "
                    f"the model has the token ids 0 to {vocab_size - 1} only"
                )


# ---------------------------------------------------------------------------------- results


@attrs.frozen(kw_only=True)
class TokenLogprob:
    """How likely one token was under the model, before penalties, temperature and filters.

    Args:
        token_id: the token.
        logprob: natural logarithm of its probability, at most 0.
        rank: 1 for the most likely token; among equal logits the lower id comes first.
        top: the most likely tokens as (token id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen(kw_only=True)
class Delta:
    """What one step adds to one output of a request.

    The last delta of an output has a ``finish_reason``; the texts of all deltas of an output,
    in order, are its text. A delta may carry tokens without text (held back: half a character,
    the start of a stop string) and text without tokens (what was held back).

    Args:
        request_id: the request.
        index: which of its ``n`` outputs.
        token_ids: new tokens, the one that ended the output included.
        text: new text.
        logprobs: one for each new token, or empty when not asked for.
        finish_reason: set in the last delta.
        stop_reason: the stop string or token id that ended it, if one did.
        error: what failed, with ``finish_reason`` error.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last delta of its output."""
        return self.finish_reason is not None


@attrs.frozen(kw_only=True)
class Output:
    """One complete output of a request.

    Args:
        index: which of the request's ``n`` outputs.
        text: the text, without the stop string unless asked for.
        token_ids: every new token, the one that ended the output included.
        finish_reason: why it ended.
        stop_reason: the stop string or token id that ended it, if one did.
        logprobs: one for each token, or empty when not asked for.
        error: what failed, with ``finish_reason`` error.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@attrs.frozen(kw_only=True)
class RequestOutput:
    """The complete result of a request.

    Args:
        request_id: the request.
        prompt_token_ids: its prompt.
        outputs: one for each of ``n``, in order of index.
        prompt_logprobs: one for each prompt token, None for the first (nothing predicts it);
            empty when not asked for.
        cached_tokens: how many prompt tokens came from a cache.
        cached_tier: from which tier (the slowest one that was used); None for none.
        exact: false when a cached prefix was recovered approximately.
        invariant: whether the numbers did not depend on the rest of the batch.
        drafted: draft tokens that were verified, over all outputs.
        accepted: how many of them were accepted.
        ttft_s: from arrival to the first token; None if there was none.
        total_s: from arrival to the end.
        queue_s: from arrival to the first step.
        error: what failed, when the request failed as a whole.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached_tokens: int = 0
    cached_tier: str | None = None
    exact: bool = True
    invariant: bool
    drafted: int = 0
    accepted: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0
    queue_s: float = 0.0
    error: str | None = None

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text if self.outputs else ""
