"""Options of the built-in components; light, so that a configuration is checked without torch."""

from __future__ import annotations

from attrs import field, frozen, validators

from deepinfer_core.config import MOST_THREADS
from deepinfer_core.typed import as_tuple, typed

_POSITIVE = validators.gt(0.0)
_NOT_NEGATIVE = validators.ge(0)


@frozen(kw_only=True, field_transformer=typed)
class FcfsConfig:
    """Options of scheduler ``fcfs``.

    Attributes:
        ageing_s: seconds of waiting that make up for one priority level, > 0. A request is
            overtaken only by those that arrive less than that, for each level of difference, after
            it.
        prefill_chunk_tokens: most prompt tokens a step computes while other sequences decode, which
            bounds the time between their tokens; 0 = as many as the step holds.
        headroom_tokens: room in tokens per running sequence that must be left for growth when
            another one is admitted; more means fewer preemptions and smaller batches.
    """

    ageing_s: float = field(default=10.0, validator=_POSITIVE)
    prefill_chunk_tokens: int = field(default=0, validator=_NOT_NEGATIVE)
    headroom_tokens: int = field(default=16, validator=_NOT_NEGATIVE)


@frozen(kw_only=True, field_transformer=typed)
class FixedBudgetConfig:
    """Options of budget ``fixed``.

    Attributes:
        drafts_per_sequence: most drafts of one sequence that a step verifies; 0 = all it has.
    """

    drafts_per_sequence: int = field(default=0, validator=_NOT_NEGATIVE)


@frozen(kw_only=True, field_transformer=typed)
class LogObserverConfig:
    """Options of observer ``log``.

    Attributes:
        events: names of the events to log; empty = all.
        level: "debug", "info" or "warning".
    """

    events: tuple[str, ...] = field(default=(), converter=as_tuple)
    level: str = field(default="info", validator=validators.in_(("debug", "info", "warning")))


@frozen(kw_only=True, field_transformer=typed)
class JsonlObserverConfig:
    """Options of observer ``jsonl``.

    Attributes:
        path: file that gets one JSON object a line; appended to, made if missing.
        events: names of the events to write; empty = all.
    """

    path: str = field(default="deepinfer-events.jsonl", validator=validators.min_len(1))
    events: tuple[str, ...] = field(default=(), converter=as_tuple)


@frozen(kw_only=True, field_transformer=typed)
class CpuConfig:
    """Options of accelerator ``cpu``.

    Attributes:
        threads: computing threads, at most 1024; 0 = one for each core this process may use.
    """

    threads: int = field(default=0, validator=[_NOT_NEGATIVE, validators.le(MOST_THREADS)])
