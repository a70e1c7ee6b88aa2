"""How a download reports to people: silently, or with a bar on a terminal."""

from __future__ import annotations

from typing import Any, Protocol, TextIO


class Progress(Protocol):
    """Told about a download; called from the downloading thread."""

    def start(self, label: str, total_bytes: int | None, done_bytes: int) -> None:
        """A file begins; ``done_bytes`` are there from an earlier attempt."""
        ...

    def advance(self, num_bytes: int) -> None:
        """More bytes of the current file are stored."""
        ...

    def finish(self) -> None:
        """The current file ends, complete or not."""
        ...

    def notice(self, text: str) -> None:
        """Something a person wants to know, in one line."""
        ...


class Silent:
    """Reports nothing."""

    def start(self, label: str, total_bytes: int | None, done_bytes: int) -> None:
        """Do nothing."""

    def advance(self, num_bytes: int) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def notice(self, text: str) -> None:
        """Do nothing."""


class TerminalProgress:
    """Writes notices to a stream, and draws bars on it if it is a terminal.

    Args:
        stream: usually standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None

    def start(self, label: str, total_bytes: int | None, done_bytes: int) -> None:
        """Draw a bar if the stream is a terminal."""
        self.finish()
        if not self._stream.isatty():
            return
        from tqdm import tqdm

        self._bar = tqdm(
            desc=label,
            total=total_bytes,
            initial=done_bytes,
            unit="B",
            unit_scale=True,
            file=self._stream,
        )

    def advance(self, num_bytes: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def finish(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def notice(self, text: str) -> None:
        """Write a line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()
