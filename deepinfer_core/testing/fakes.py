"""Small stand-ins for the parts around the one under test.

The simulated core for schedulers is in ``simulation``; components that are small but right, for
slots that core leaves to plugins, are in ``examples``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from deepinfer_core.errors import ConformanceError
from deepinfer_core.interfaces.drafter import CommittedRows, Draft, DraftOutcome, DraftRequest
from deepinfer_core.interfaces.observer import Event
from deepinfer_core.testing.simulation import Arrival, Decision, SimulatedCore, SimulatedRound

if TYPE_CHECKING:
    import torch

    from deepinfer_core.text.tokenizer import Tokenizer

__all__ = [
    "CHAT_TEMPLATE",
    "CONTROL_TOKENS",
    "Arrival",
    "Decision",
    "FakeClock",
    "RecordingObserver",
    "ScriptedDrafter",
    "SimulatedCore",
    "SimulatedRound",
    "byte_tokenizer",
]


class FakeClock:
    """A clock that stands still until it is told to go on.

    Args:
        now_s: what it shows first.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> float:
        """Go on, never back; returns the new time."""
        if seconds < 0:
            raise ConformanceError(f"a clock cannot go back: advance({seconds})")
        self.now_s += seconds
        return self.now_s


class RecordingObserver:
    """Keeps a copy of every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def observe(self, event: Event) -> None:
        """Copy one event."""
        self.events.append(evolve(event, fields=dict(event.fields)))

    def close(self) -> None:
        """Count how often it was called."""
        self.closed += 1

    def names(self) -> list[str]:
        """Return the events' names, in order."""
        return [event.name for event in self.events]


class ScriptedDrafter:
    """Proposes whatever a function says, and records what it is told.

    Args:
        script: from request to proposals; what is beyond ``limit`` is cut off.
        confidence: of each proposal.
        taps: layers it claims to read.

    A script that knows the whole output of a greedy target has all its drafts accepted, one that
    returns wrong tokens has none.
    """

    def __init__(
        self,
        script: Callable[[DraftRequest], Sequence[int]],
        *,
        confidence: float = 0.5,
        taps: Sequence[str] = (),
    ) -> None:
        self.taps = tuple(taps)
        self.replay_tokens = 0
        self.requests: list[DraftRequest] = []
        self.committed: dict[int, int] = {}
        self.released: list[int] = []
        self.outcomes: list[DraftOutcome] = []
        self._script = script
        self._confidence = confidence

    @classmethod
    def of_outputs(
        cls, outputs: Sequence[Sequence[int]], *, wrong_every: int = 0
    ) -> ScriptedDrafter:
        """Return one that knows whole sequences, prompts included.

        Args:
            outputs: the sequences; the one that starts with a request's tokens is continued.
            wrong_every: replace every so many-th position by a wrong token; 0 = never.
        """

        def script(request: DraftRequest) -> Sequence[int]:
            known = list(request.token_ids)
            for output in outputs:
                if list(output[: len(known)]) == known:
                    return [
                        token ^ 1 if wrong_every and position % wrong_every == 0 else token
                        for position, token in enumerate(output[len(known) :], start=len(known))
                    ]
            return ()

        return cls(script)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Ask the script."""
        self.requests += requests
        drafts = []
        for request in requests:
            token_ids = list(self._script(request))[: request.limit]
            confidences = [self._confidence] * len(token_ids)
            drafts.append(Draft(token_ids=token_ids, confidences=confidences))
        return drafts

    def judge(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Record what became of drafts."""
        self.outcomes += outcomes

    def observe(self, rows: CommittedRows, taps: Mapping[str, torch.Tensor]) -> None:
        """Check that the layers it asked for are there."""
        if set(taps) != set(self.taps):
            raise ConformanceError(f"asked for taps {self.taps}, got {sorted(taps)}")

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Record the length."""
        self.committed[sequence_id] = num_tokens

    def fork(self, parent_id: int, child_id: int) -> None:
        """Copy the length."""
        self.committed[child_id] = self.committed.get(parent_id, 0)

    def release(self, sequence_id: int) -> None:
        """Forget the length."""
        self.committed.pop(sequence_id, None)
        self.released.append(sequence_id)


CONTROL_TOKENS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Control tokens of ``byte_tokenizer``, from id 256."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template that uses the control tokens of ``byte_tokenizer``."""


def byte_tokenizer(control_tokens: Sequence[str] = CONTROL_TOKENS) -> Tokenizer:
    """Return a real tokenizer whose tokens are the 256 bytes, then some control tokens.

    Args:
        control_tokens: the first begins a sequence, the second ends it.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from deepinfer_core.text.tokenizer import Tokenizer

    spellings = _byte_spellings()
    vocabulary = {spelling: byte for byte, spelling in enumerate(spellings)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in control_tokens]
    )
    first = len(spellings)
    return Tokenizer(backend, bos_id=first, eos_ids=[first + 1])


def _byte_spellings() -> list[str]:
    """Return the characters by which byte-level vocabularies write the bytes 0 to 255.

    Printable characters of Latin-1 stand for themselves, the others for 256, 257, ... in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
