"""What a prefix cache is worth: prices and revenue.

Pure arithmetic. Prices are per million tokens, in whatever currency they come in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import field, frozen, validators

from deepinfer_core.errors import RequestError, reason

MILLION = 1_000_000
HOUR_S = 3600
_NOT_NEGATIVE = validators.ge(0.0)
_COUNT = validators.ge(0)
_SHARE = validators.and_(validators.ge(0.0), validators.le(1.0))


@frozen(kw_only=True)
class Prices:
    """Prices per million tokens.

    Attributes:
        hit: of prompt tokens that came from the cache.
        miss: of prompt tokens that were computed.
        output: of generated tokens.
    """

    hit: float = field(validator=_NOT_NEGATIVE)
    miss: float = field(validator=_NOT_NEGATIVE)
    output: float = field(default=0.0, validator=_NOT_NEGATIVE)

    def input_at(self, hit_rate: float) -> float:
        """The effective price of a million prompt tokens."""
        return hit_rate * self.hit + (1 - hit_rate) * self.miss


@frozen(kw_only=True)
class Fleet:
    """Cards that prefill and cards that decode.

    Attributes:
        prefill_rate: prompt tokens a second of a card that prefills, hits included.
        decode_rate: generated tokens a second of a card that decodes.
        prefill_cards: how many of the one kind there are,
        decode_cards: and of the other.
    """

    prefill_rate: float = field(validator=_NOT_NEGATIVE)
    decode_rate: float = field(validator=_NOT_NEGATIVE)
    prefill_cards: float = field(default=1.0, validator=_NOT_NEGATIVE)
    decode_cards: float = field(default=1.0, validator=_NOT_NEGATIVE)

    def prefill_revenue(self, prices: Prices, hit_rate: float) -> float:
        """Of one card that prefills for an hour."""
        return self.prefill_rate * HOUR_S / MILLION * prices.input_at(hit_rate)

    def decode_revenue(self, prices: Prices) -> float:
        """Of one card that decodes for an hour."""
        return self.decode_rate * HOUR_S / MILLION * prices.output

    def revenue(self, prices: Prices, hit_rate: float) -> float:
        """Of one card for an hour, on average over both kinds.

        Raises:
            RequestError: there are no cards.
        """
        cards = self.prefill_cards + self.decode_cards
        if not cards:
            raise RequestError("there are no cards: at least one side of PREFILL:DECODE is above 0")
        prefill = self.prefill_cards * self.prefill_revenue(prices, hit_rate)
        return (prefill + self.decode_cards * self.decode_revenue(prices)) / cards


@frozen(kw_only=True)
class Tokens:
    """Tokens of a period or a trace.

    Attributes:
        prompt: prompt tokens.
        cached: those of them that came from a cache.
        output: generated tokens.
        requests: how many requests they belong to, 0 = not known.
    """

    prompt: int = field(validator=_COUNT)
    cached: int = field(validator=_COUNT)
    output: int = field(default=0, validator=_COUNT)
    requests: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse more hits than there are tokens."""
        if self.cached > self.prompt:
            raise RequestError(
                f"{self.cached} cached tokens are more than the {self.prompt} prompt tokens"
            )

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from a cache."""
        return self.cached / self.prompt if self.prompt else 0.0

    def bill(self, prices: Prices) -> float:
        """What they cost."""
        computed = self.prompt - self.cached
        return (
            self.cached * prices.hit + computed * prices.miss + self.output * prices.output
        ) / MILLION


def read_trace(path: Path) -> Tokens:
    """Add up a file of JSON lines.

    Takes what observer ``jsonl`` writes (its events "request.finished") and what ``deepinfer
    generate --json`` and ``deepinfer batch`` write; other lines are skipped.

    Raises:
        RequestError: it cannot be read, or holds no finished request.
    """
    prompt = cached = output = requests = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for fields in _requests(lines):
                prompt += fields["prompt_tokens"]
                cached += fields["cached_tokens"]
                output += fields.get("output_tokens", len(fields.get("token_ids", ())))
                requests += 1
    except (OSError, UnicodeDecodeError, TypeError) as error:
        raise RequestError(f"cannot read the trace {path}: {reason(error)}") from error
    if not requests:
        raise RequestError(
            f"{path} holds no finished request: a line is a JSON object with prompt_tokens and "
            'cached_tokens, as observer "jsonl" writes it'
        )
    return Tokens(prompt=prompt, cached=cached, output=output, requests=requests)


def _requests(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            fields = found.get("fields", found)
            if isinstance(fields, dict) and {"prompt_tokens", "cached_tokens"} <= fields.keys():
                yield fields
