"""A progress bar over requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer_core.requests import RequestOutput


class ProgressBar:
    """A bar over requests on a terminal, nothing elsewhere.

    Args:
        total: how many requests there are; None if unknown.
        wanted: False shows nothing at all.
        done: how many were complete before.
    """

    def __init__(self, total: int | None, wanted: bool, done: int = 0) -> None:
        self._total = total
        self._done = done
        self._wanted = wanted
        self._bar: Any = None
        self._tokens = 0

    def __enter__(self) -> Callable[[RequestOutput | None], None]:
        """Show the bar and return what counts one more result."""
        if self._wanted:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, initial=self._done, unit="prompt", disable=None)
        return self._advance

    def _advance(self, result: RequestOutput | None) -> None:
        if self._bar is None:
            return
        if result is not None:
            self._tokens += sum(len(output.token_ids) for output in result.outputs)
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        self._bar.set_postfix_str(f"{self._tokens / elapsed:.0f} tok/s", refresh=False)
        self._bar.update(1)

    def __exit__(self, *exc_info: object) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._bar is not None:
            self._bar.close()
