"""Prompts with given numbers of tokens."""

from __future__ import annotations

from importlib.resources import files
from random import Random
from typing import Literal

from attrs import frozen

from deepinfer_core.engine.surface import TextCodec
from deepinfer_core.errors import RequestError
from deepinfer_core.requests import SamplingParams

Source = Literal["text", "random"]


@frozen(kw_only=True)
class Shape:
    """How much a request reads and writes.

    Attributes:
        input_tokens: length of the prompt.
        output_tokens: new tokens; the end token does not end a request earlier.
    """

    input_tokens: int
    output_tokens: int

    def __attrs_post_init__(self) -> None:
        """Refuse empty prompts and outputs."""
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def params(self) -> SamplingParams:
        """Greedy, and exactly as long as asked."""
        return SamplingParams(max_tokens=self.output_tokens, temperature=0.0, ignore_eos=True)


def make_prompts(
    tokenizer: TextCodec, count: int, num_tokens: int, *, source: Source = "text", seed: int = 0
) -> list[tuple[int, ...]]:
    """Return prompts of exactly ``num_tokens`` tokens that share no beginning.

    Args:
        tokenizer: of the model that is measured.
        count: how many prompts.
        num_tokens: length of each.
        source: "text" cuts windows out of a bundled text, repeated as needed; "random" draws from
            the tokens that occur in it.
        seed: of the windows' places and of the draws.
    """
    text = files("deepinfer_core.bench").joinpath("corpus.txt").read_text(encoding="utf-8")
    corpus = list(tokenizer.encode(text, add_special_tokens=False))
    random = Random(str(seed))  # as a number, -1 would be the same seed as 1
    if source == "random":
        known = sorted(set(corpus))
        return [tuple(random.choices(known, k=num_tokens)) for _ in range(count)]
    starts = list(range(len(corpus)))
    random.shuffle(starts)
    return [_window(corpus, starts[at % len(starts)], num_tokens) for at in range(count)]


def _window(corpus: list[int], start: int, length: int) -> tuple[int, ...]:
    turned = corpus[start:] + corpus[:start]
    repeats = -(-length // len(turned))
    return tuple((turned * repeats)[:length])
