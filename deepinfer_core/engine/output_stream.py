"""Tokens of one output as they become known -> text, stop decisions, deltas."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from deepinfer_core.requests import Delta, FinishReason, Output, SamplingParams, TokenLogprob
from deepinfer_core.text.detokenizer import StreamDetokenizer
from deepinfer_core.text.stops import StopChecker

Decode = Callable[[Items[int]], str]


class OutputStream:
    """One output in the making.

    Args:
        request_id: whose.
        index: which of the request's outputs.
        params: the request's parameters.
        eos_token_ids: the model's end tokens.
        detokenizer: fresh, or None to leave text out.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        eos_token_ids: Items[int],
        detokenizer: StreamDetokenizer | None,
    ) -> None:
        self._request_id, self._index, self._params = request_id, index, params
        self._ends = frozenset(params.stop_token_ids)
        # Nothing follows the end of a grammar, whatever else was asked for.
        if not params.ignore_eos or params.structured is not None:
            self._ends |= frozenset(eos_token_ids)
        self._detokenizer = detokenizer
        self._stops = StopChecker(params.stop, params.include_stop)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: Delta | None = None

    def push(
        self, token_ids: Items[int], logprobs: Items[TokenLogprob | None], *, is_last: bool
    ) -> Delta:
        """Tokens became known.

        Args:
            token_ids: at least one; those behind the one that ends the output are dropped.
            logprobs: a report for each, None where none was asked for.
            is_last: the output ends with them for want of room, if nothing else ends it.
        """
        taken: list[int] = []
        text = ""
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            taken.append(token_id)
            self._token_ids.append(token_id)
            self._logprobs += () if logprob is None else (logprob,)
            piece, stop = self._push_one(token_id)
            text += piece
            is_end = is_last and len(taken) == len(token_ids)
            if stop is not None or is_end:
                reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
                reports = _reports(logprobs[: len(taken)])
                return self._end(
                    reason, text=text, stop=stop, token_ids=tuple(taken), logprobs=reports
                )
        self._texts.append(text)
        return Delta(
            request_id=self._request_id,
            index=self._index,
            token_ids=tuple(taken),
            text=text,
            logprobs=_reports(logprobs),
        )

    def _push_one(self, token_id: int) -> tuple[str, str | int | None]:
        """New text, and the stop string or id that ends the output here."""
        enough = len(self._token_ids) >= self._params.min_tokens
        ended = enough and token_id in self._ends
        text, matched = "", None
        if self._detokenizer is not None and (not ended or self._params.include_stop):
            piece = self._detokenizer.push([token_id])
            text, matched = self._stops.push(piece, ignore=not enough)
        return text, matched if matched is not None else token_id if ended else None

    def finish(self, reason: FinishReason, error: str | None = None) -> Delta:
        """End the output for another reason than a token."""
        return self._end(reason, error=error)

    def _end(
        self,
        reason: FinishReason,
        *,
        text: str = "",
        stop: str | int | None = None,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
    ) -> Delta:
        if self._detokenizer is not None and error is None and not isinstance(stop, str):
            rest, matched = self._stops.push(self._detokenizer.finish())
            text += rest
            if matched is not None:
                reason, stop = FinishReason.STOP, matched
            else:
                text += self._stops.flush()
        self._texts.append(text)
        self._last = Delta(
            request_id=self._request_id,
            index=self._index,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop,
            error=error,
        )
        return self._last

    def output(self) -> Output:
        """The complete output; call after the last delta."""
        last = self._last
        reason = (
            FinishReason.ABORT if last is None or last.finish_reason is None else last.finish_reason
        )
        return Output(
            index=self._index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            stop_reason=None if last is None else last.stop_reason,
            logprobs=tuple(self._logprobs),
            error=None if last is None else last.error,
        )


def _reports(logprobs: Items[TokenLogprob | None]) -> tuple[TokenLogprob, ...]:
    return tuple(report for report in logprobs if report is not None)
