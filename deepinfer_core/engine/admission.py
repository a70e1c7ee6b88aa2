"""What is let in: checks of a request against this engine, with messages that say what to do."""

from __future__ import annotations

from collections.abc import Sequence as Items

from attrs import frozen

from deepinfer_core.errors import AdmissionError, RequestError
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.requests import Request


@frozen(kw_only=True)
class Limits:
    """What this engine can take.

    Attributes:
        vocab_size: token ids are below it.
        max_length: longest sequence, in tokens: the model's context or the configured limit.
        capacity: longest sequence whose state fits into the empty cache, in tokens.
        max_waiting: requests that may wait.
        decoder_keep: last rows of a prompt that have logits, 0 = all.
    """

    vocab_size: int
    max_length: int
    capacity: int
    max_waiting: int
    decoder_keep: int = 0


def capacity(groups: Items[CacheGroupSpec], num_pages: Items[int], max_batch_tokens: int) -> int:
    """Longest sequence, in tokens, whose state fits when it is alone."""
    longest = []
    for group, pages in zip(groups, num_pages, strict=True):
        held = pages * group.page_size
        if group.kind is GroupKind.STATE:
            continue
        if (
            group.kind is GroupKind.WINDOW
            and held >= group.window + max_batch_tokens + 2 * group.page_size
        ):
            continue  # pages that leave the window come back while the sequence grows
        longest.append(held)
    return min(longest, default=2**31 - 1)


def admit(request: Request, limits: Limits, num_waiting: int) -> int:
    """Check a request; return the most tokens each of its outputs may reach, prompt included.

    Raises:
        RequestError: the request is wrong.
        AdmissionError: it can never fit, or too many are waiting.
    """
    request.check_vocabulary(limits.vocab_size)
    prompt, params = len(request.prompt_token_ids), request.params
    name = f"request {request.request_id!r}"
    room = limits.max_length - (0 if params.max_tokens == 0 else 1)
    if prompt > room:
        raise RequestError(
            f"{name}: its prompt of {prompt} tokens does not fit into the context of "
            f"{limits.max_length} tokens; shorten it"
        )
    if params.prompt_logprobs is not None and 0 < limits.decoder_keep < prompt:
        raise RequestError(
            f"{name}: prompt_logprobs cannot be had, since this model's decoder computes only the "
            f"last {limits.decoder_keep} rows of a prompt; set model_component.decoder to 'off' "
            "for them"
        )
    wanted = limits.max_length
    if params.max_tokens is not None:
        wanted = min(wanted, prompt + params.max_tokens)
    must = max(prompt + min(1, params.max_tokens or 1), prompt + params.min_tokens)
    if params.max_tokens is not None:
        must = wanted
    if must > limits.capacity:
        raise AdmissionError(
            f"{name} needs room for {must} tokens, but the whole KV cache holds "
            f"{limits.capacity}; ask for fewer tokens, or give it more room "
            "(engine.kv_memory_bytes, or engine.kv_pages where that is set)"
        )
    if num_waiting >= limits.max_waiting + 1:
        raise AdmissionError(
            f"{name}: {num_waiting} requests are waiting already (engine.max_waiting = "
            f"{limits.max_waiting}); try again later",
            busy=True,
        )
    return min(wanted, limits.capacity)
