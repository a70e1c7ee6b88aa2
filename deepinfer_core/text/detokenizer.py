"""Token ids to text, piece by piece, never half a character.

The pieces of a `StreamDetokenizer`, joined, are the text of all its ids decoded at once. Each
step decodes a short window of recent tokens and emits what is new, so that the cost is linear in
the output. The window must be long enough that its beginning no longer matters: decoders look at
their neighbours (a leading space is dropped at the start, bytes join to characters), but not far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence

REPLACEMENT = "\ufffd"
"""What decoders put where bytes are no UTF-8, or not yet."""

_MAX_PENDING = 3
"""An incomplete UTF-8 character has at most three bytes, so at most three replacements."""

_KEEP = 8  # tokens that stay in front of new ones
_TRIM_AT = 24


class StreamDetokenizer:
    """Turns the token ids of one output into text as they come.

    What `decode` must promise: more tokens may change trailing replacement characters, and text
    of trailing ``unstable_ids``; all other text stays as it is.

    Args:
        decode: token ids -> text; called with lists that are not kept.
        context_ids: the last tokens of the text that the output continues; their own text is not
            emitted, but whether the output starts with a space depends on them.
        unstable_ids: tokens whose text is open until another kind of token follows: the
            ``<0xE4>`` of byte-fallback vocabularies, where one bad byte changes its whole run.
            See `byte_fallback_ids`.
        skip_ids: tokens that `decode` leaves out anyway (special tokens); never passed to it.
            Give them wherever ``unstable_ids`` are given: bytes join across them.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        context_ids: Sequence[int] = (),
        unstable_ids: Collection[int] = (),
        skip_ids: Container[int] = (),
    ) -> None:
        self._decode = decode
        self._unstable_ids = unstable_ids
        self._skip_ids = skip_ids
        self._window = [token for token in context_ids if token not in skip_ids]
        self._text = decode(list(self._window)) if self._window else ""
        self._sent = _settled(self._text, 0)  # characters of self._text that need no emitting
        self._trim_at = len(self._window) + _TRIM_AT

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens.

        Returns:
            Text that they complete; it never changes later.
        """
        new = [token for token in token_ids if token not in self._skip_ids]
        if not new:
            return ""
        self._window += new
        if self._unstable_ids and all(token in self._unstable_ids for token in new):
            return ""  # all of it is held back, and long runs would be decoded again and again
        before, self._text = self._text, self._decode(list(self._window))
        if before == self._text and self._sent == len(before) > 0:
            del self._window[-len(new) :]  # they say nothing; a long row of them must not grow
            return ""
        piece = self._emit(self._hold())
        if len(self._window) >= self._trim_at:
            self._trim()
        return piece

    def finish(self) -> str:
        """Return the rest of the text; no more tokens follow."""
        self._text = self._decode(list(self._window)) if self._window else ""
        piece = self._emit(len(self._text))
        self._window = []
        self._text = ""
        self._sent = 0
        return piece

    def _emit(self, end: int) -> str:
        piece = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _hold(self) -> int:
        """Return how many characters of the window's text are settled."""
        end = _settled(self._text, self._sent)
        run = self._last_unstable_run()
        if run is None:
            return end
        before, after = run
        if after < len(self._window):
            through_run = self._decode(self._window[:after])
            if len(self._text) > len(through_run) and self._text.startswith(through_run):
                return end  # text follows the run, so that it is closed
        return min(end, len(self._decode(self._window[:before])) if before else 0)

    def _last_unstable_run(self) -> tuple[int, int] | None:
        """Return where the last run of unstable tokens in the window starts and ends."""
        after = len(self._window)
        while after and self._window[after - 1] not in self._unstable_ids:
            after -= 1
        if not after:
            return None
        before = after
        while before and self._window[before - 1] in self._unstable_ids:
            before -= 1
        return before, after

    def _trim(self) -> None:
        """Forget tokens in front, if what is left decodes to the same end."""
        pending = len(self._text) - self._sent
        window = self._window[-_KEEP:]
        text = self._decode(list(window))
        same_end = not pending or text[-pending:] == self._text[-pending:]
        if len(text) > pending and same_end:
            self._window = window
            self._text = text
            self._sent = len(text) - pending
            self._trim_at = len(window) + _TRIM_AT - _KEEP
        else:
            self._trim_at = 2 * len(self._window)


def _settled(text: str, sent: int) -> int:
    """Return the length of ``text`` without replacements that may still become a character."""
    end = len(text)
    lowest = max(sent, end - _MAX_PENDING)
    while end > lowest and text[end - 1] == REPLACEMENT:
        end -= 1
    return end


def byte_fallback_ids(vocabulary: Mapping[str, int]) -> frozenset[int]:
    """Return the ids of a vocabulary's byte tokens, ``<0x00>`` to ``<0xFF>``.

    Args:
        vocabulary: token -> id.
    """
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return frozenset(vocabulary[name] for name in names if name in vocabulary)
