"""Everything an engine is put together from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from deepinfer_core.config import EngineConfig
from deepinfer_core.interfaces.accelerator import Accelerator
from deepinfer_core.interfaces.budget import Budget
from deepinfer_core.interfaces.cache import Cache
from deepinfer_core.interfaces.constraint import Constraint
from deepinfer_core.interfaces.drafter import Drafter
from deepinfer_core.interfaces.executor import Executor
from deepinfer_core.interfaces.model import ModelSpec
from deepinfer_core.interfaces.observer import Observer
from deepinfer_core.interfaces.recipe import Recipe
from deepinfer_core.interfaces.scheduler import Scheduler
from deepinfer_core.plan import Plan
from deepinfer_core.text.detokenizer import StreamDetokenizer


def _nothing() -> None:
    return None


@frozen(kw_only=True, eq=False)
class EngineParts:
    """What ``Engine`` runs on.

    Attributes:
        config: the configuration, resolved.
        plan: what was chosen.
        spec: the model.
        accelerator, executor, cache, scheduler, observers: the parts at work.
        drafter: who proposes tokens; None without drafts.
        draw: op "draw" of the model's kernels; None = its reference.
        budget: how many of them are verified; None without drafts.
        constraint: makes the compiler of grammars when the first one is asked for; None if no
            constraint is composed. Called from any thread, makes one object.
        max_length: longest sequence, in tokens.
        capacity: longest sequence whose state fits into the empty cache, in tokens.
        eos_token_ids: ids that end an output.
        invariant: whether a row's numbers do not depend on its batch.
        overlap: whether the host looks at a step's tokens while the next one runs.
        tokenizer: None if the checkpoint carries none; ``tokenizer_error`` says why.
        detokenizer: ``(skip_special_tokens, prompt_token_ids) -> StreamDetokenizer``, None without
            a tokenizer.
        recipe: makes what renders conversations, or raises an EngineError that says why not; only
            who chats pays for it.
        close: gives back what nothing else does (checkpoint files).
    """

    config: EngineConfig
    plan: Plan
    spec: ModelSpec
    accelerator: Accelerator
    executor: Executor
    cache: Cache
    scheduler: Scheduler
    observers: tuple[tuple[str, Observer], ...] = ()
    draw: Any = None
    drafter: Drafter | None = None
    budget: Budget | None = None
    constraint: Callable[[], Constraint] | None = None
    max_length: int
    capacity: int
    eos_token_ids: tuple[int, ...] = ()
    invariant: bool = False
    overlap: bool = False
    tokenizer: Any = None
    tokenizer_error: str = ""
    detokenizer: Callable[[bool, Sequence[int]], StreamDetokenizer] | None = None
    recipe: Callable[[], Recipe] | None = None
    close: Callable[[], None] = _nothing
