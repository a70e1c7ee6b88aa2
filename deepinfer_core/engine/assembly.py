"""Configuration -> plan -> parts: the only place where an engine is put together."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from deepinfer_core import values
from deepinfer_core.capabilities import Feature
from deepinfer_core.checkpoint.coverage import KNOWN_BUFFERS, check_coverage
from deepinfer_core.components import Slot
from deepinfer_core.compose import compose, device_type
from deepinfer_core.config import AUTO, NONE, EngineConfig, apply_environ
from deepinfer_core.engine.admission import capacity
from deepinfer_core.engine.model_facts import FoundModel, find
from deepinfer_core.engine.namespace import content_of, identity_of, namespace_of
from deepinfer_core.engine.parts import EngineParts
from deepinfer_core.engine.sizing import page_counts
from deepinfer_core.engine.step_times import StepTimes
from deepinfer_core.errors import CompositionError, ConfigError, DeepInferError, EngineError
from deepinfer_core.hub.locate import default_cache_dir
from deepinfer_core.interfaces.accelerator import Accelerator, AcceleratorContext
from deepinfer_core.interfaces.attention import Attention, AttentionContext, GroupStorage
from deepinfer_core.interfaces.budget import Budget, BudgetContext
from deepinfer_core.interfaces.cache import Cache, CacheContext
from deepinfer_core.interfaces.checkpoint import Checkpoint
from deepinfer_core.interfaces.constraint import Constraint, ConstraintContext
from deepinfer_core.interfaces.drafter import BlockDraftModel, Drafter, DrafterContext
from deepinfer_core.interfaces.eviction import EvictionContext
from deepinfer_core.interfaces.executor import Executor
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts
from deepinfer_core.interfaces.kv_store import KvStoreContext
from deepinfer_core.interfaces.model import BuildRequest, Model, ModelSpec
from deepinfer_core.interfaces.observer import ObserverContext
from deepinfer_core.interfaces.parser import ParserContext
from deepinfer_core.interfaces.recipe import RecipeContext
from deepinfer_core.interfaces.scheduler import SchedulerContext
from deepinfer_core.log import get_logger
from deepinfer_core.ops.table import OpChoice, OpTable, choose
from deepinfer_core.plan import Plan
from deepinfer_core.plugins import PluginHost
from deepinfer_core.resolve import require_environ
from deepinfer_core.runner import LocalExecutor
from deepinfer_core.text.detokenizer import StreamDetokenizer, byte_fallback_ids
from deepinfer_core.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 8
"""Prompt tokens a detokenizer looks back at."""


def plan_model(
    config: EngineConfig,
    host: PluginHost,
    environ: Mapping[str, str],
    *,
    offline: bool = False,
    config_only: bool = False,
    progress: Any = None,
) -> tuple[Plan, FoundModel]:
    """Compose for the configured model; reads no weight and touches no device.

    See ``find`` for the arguments.

    Raises:
        DeepInferError: whatever makes the engine impossible.
    """
    found = find(config, host, environ, offline=offline, config_only=config_only, progress=progress)
    plan = compose(host, config, model=found.facts)
    return plan, found


def plan_ops(plan: Plan, dtype: str, device_type: str, *, invariant: bool) -> tuple[OpChoice, ...]:
    """Bind a provider to every op, by name only.

    Raises:
        CompositionError: an op nobody can serve.
    """
    context = KernelsContext(device_type=device_type)
    sets = [(part.name, part.build(context).providers()) for part in plan.parts_of(Slot.KERNELS)]
    attention = plan.part(Slot.ATTENTION)
    model = plan.model
    sizes = {} if model is None else {"heads": model.num_query_heads, "head_dim": model.head_dim}
    facts = OpFacts(
        device_type=device_type,
        dtype=dtype,
        shapes={name: size for name, size in sizes.items() if size},
        batch_invariant=invariant,
        attention="" if attention is None else attention.name,
    )
    return choose(sets, facts)


def describe_drafts(plan: Plan, taps: Items[str] = ()) -> str:
    """Say what a plan does about drafts.

    Args:
        plan: what was chosen.
        taps: layers that the drafter reads, where that is known.
    """
    drafter, budget, options = plan.part(Slot.DRAFTER), plan.part(Slot.BUDGET), plan.config.engine
    if drafter is None or drafter.name == NONE or budget is None:
        return "none"
    reads = f", reads {' '.join(taps)}" if taps else ""
    return (
        f"at most {options.max_drafts} a sequence, {options.verification} verification, "
        f"budget {budget.name}{reads}"
    )


def assemble(
    config: EngineConfig,
    plugins: Items[object] = (),
    *,
    discover: bool = True,
    environ: Mapping[str, str] | None = None,
    progress: Any = None,
    host: PluginHost | None = None,
) -> EngineParts:
    """Build everything; see ``Engine.from_config`` for the arguments.

    Raises:
        DeepInferError: whatever makes the engine impossible.
    """
    allowed = "an EngineConfig (load_config reads one from a file)"
    values.instance("config", config, EngineConfig, allowed, ConfigError)
    environ = os.environ if environ is None else environ  # noqa: TID251 - read once, here
    config = apply_environ(config, environ)
    if host is None:
        host = PluginHost(plugins, config=config.plugins, discover=discover)
        for line in host.warnings():
            get_logger("plugins").warning("plugins.doubtful", detail=line)
    require_environ(config, host, environ)
    plan, found = plan_model(config, host, environ, progress=progress)
    builder = _Builder(plan, found)
    try:
        return builder.build()
    except BaseException:
        builder.abandon()
        raise


class _Builder:
    """Builds the parts of one plan in the order of ``Slot``."""

    def __init__(self, plan: Plan, found: FoundModel) -> None:
        self._plan, self._config, self._found = plan, plan.config, found
        self._options = plan.config.engine
        self._undo: list[Callable[[], None]] = [found.checkpoint.close]

    def abandon(self) -> None:
        """Give back what was built before something failed."""
        for undo in reversed(self._undo):
            undo()

    def build(self) -> EngineParts:
        """Build every part; weights are read last but one."""
        self._check_drafts()
        overlap = self._overlaps()
        accelerator: Accelerator = self._part(
            Slot.ACCELERATOR,
            AcceleratorContext(num_threads=self._options.num_threads, overlap=overlap),
        )
        self._undo.append(accelerator.close)
        dtype = _dtype(self._config, accelerator)
        spec = self._spec(dtype)
        self._check_truncation(spec)
        check_coverage(
            self._found.checkpoint, spec.weights, (*KNOWN_BUFFERS, *spec.ignored_weights)
        )
        ops, attention, dependent = self._numerics(spec, accelerator, dtype)
        invariant = not dependent
        # Most of this is Python and most of what follows is not, so both go on at once.
        reading = ThreadPoolExecutor(1, "deepinfer-tokenizer")
        tokenizing = reading.submit(self._tokenizer)
        reading.shutdown(wait=False)
        op_table = OpTable(
            ops,
            OpFacts(device_type=accelerator.device.type, dtype=dtype, batch_invariant=invariant),
        )
        model = self._found.family.build(
            BuildRequest(
                config=self._found.checkpoint.config,
                spec=spec,
                read=self._found.checkpoint.read,
                read_packed=self._found.checkpoint.read_packed,
                ops=op_table,
                dtype=dtype,
                device=accelerator.device,
                tokenizer=self._found.checkpoint.tokenizer,
            )
        )
        num_pages = page_counts(spec, self._options, accelerator.memory().free_bytes)
        storages = [
            attention.allocate(group, pages, accelerator.device)
            for group, pages in zip(spec.groups, num_pages, strict=True)
        ]
        executor = LocalExecutor(accelerator, model, attention, storages)
        details = {
            "dtype": dtype,
            "device": " ".join(f"{key}={value}" for key, value in accelerator.describe().items()),
            "invariant": f"false ({dependent})" if dependent else "true",
            "overlap": "true" if overlap else "false",
            "cache": _describe_groups(spec, num_pages),
            "ops": " ".join(f"{choice.op}={choice.provider.name}" for choice in ops),
        }
        drafter = self._drafter(spec, model, accelerator, op_table, dtype)
        budget = None if drafter is None else self._budget(spec, accelerator, executor, details)
        details["drafts"] = describe_drafts(self._plan, () if drafter is None else drafter.taps)
        tokenizer, tokenizer_error = tokenizing.result()
        again = drafter.replay_tokens if drafter is not None and drafter.taps else 0
        pages = self._cache(spec, num_pages, storages, details, recompute_tokens=again)
        return EngineParts(
            config=self._config,
            plan=self._plan.with_details(details),
            spec=spec,
            accelerator=accelerator,
            executor=executor,
            cache=pages,
            scheduler=self._part(
                Slot.SCHEDULER,
                SchedulerContext(
                    max_batch_tokens=self._options.max_batch_tokens,
                    max_sequences=self._options.max_sequences,
                ),
            ),
            observers=tuple(
                (part.name, part.build(ObserverContext(plan=self._plan)))
                for part in self._plan.parts_of(Slot.OBSERVER)
            ),
            draw=op_table.draw,
            drafter=drafter,
            budget=budget,
            constraint=self._constraint(spec, tokenizer),
            max_length=spec.max_position,
            capacity=capacity(spec.groups, num_pages, self._options.max_batch_tokens),
            eos_token_ids=self._ends(spec, tokenizer),
            invariant=invariant,
            overlap=overlap,
            tokenizer=tokenizer,
            tokenizer_error=tokenizer_error,
            detokenizer=None if tokenizer is None else detokenizers(tokenizer),
            recipe=cache(lambda: self._recipe(spec, tokenizer, tokenizer_error)),
            close=partial(_close, pages, self._found.checkpoint),
        )

    def _part(self, slot: Slot, context: Any) -> Any:
        part = self._plan.part(slot)
        return None if part is None else part.build(context)

    def _overlaps(self) -> bool:
        """Whether rounds overlap: as configured, else where the device is not the host itself."""
        if self._options.overlap != AUTO:
            return bool(self._options.overlap)
        part = self._plan.part(Slot.ACCELERATOR)
        return part is not None and device_type(part.component) != "cpu"

    def _check_drafts(self) -> None:
        """Refuse a drafter without what verification needs, before weights are read."""
        drafter = self._plan.part(Slot.DRAFTER)
        if drafter is None or drafter.name == NONE:
            return
        cache = self._plan.part(Slot.CACHE)
        if cache is not None and Feature.ROLLBACK not in cache.component.offers:
            raise CompositionError(
                f"drafter {drafter.name!r}: cache {cache.name!r} does not offer "
                f"{Feature.ROLLBACK.value}, so that rejected drafts could not be taken back; "
                "set cache.use to another, or drafter.use to 'none'"
            )
        if self._plan.part(Slot.BUDGET) is None:
            raise CompositionError(
                f"drafter {drafter.name!r} needs a budget that says how many drafts are verified; "
                "set budget.use to 'fixed', or drafter.use to 'none'"
            )

    def _check_truncation(self, spec: ModelSpec) -> None:
        """Refuse a truncated decoder that would lack part of a window once drafts are rejected."""
        if not spec.decoder_keep:
            return
        window = max(group.window for group in spec.groups if group.truncated)
        least = window + self._options.max_drafts + 1
        if spec.decoder_keep < least:
            raise CompositionError(
                f"the decoder keeps {spec.decoder_keep} rows of a prompt, but a window of {window} "
                f"and engine.max_drafts = {self._options.max_drafts} need at least {least}; raise "
                "model_component.decoder_keep, or lower engine.max_drafts"
            )

    def _drafter(
        self, spec: ModelSpec, model: Model, accelerator: Accelerator, ops: OpTable, dtype: str
    ) -> Drafter | None:
        part = self._plan.part(Slot.DRAFTER)
        if part is None or part.name == NONE:
            return None
        model_part = self._plan.part(Slot.MODEL)
        offers = frozenset() if model_part is None else model_part.component.offers
        inside = cast("BlockDraftModel", model) if Feature.BLOCK_DRAFT in offers else None
        drafter: Drafter = part.build(
            DrafterContext(
                model_spec=spec,
                model=model,
                device=accelerator.device,
                max_drafts=self._options.max_drafts,
                max_sequences=self._options.max_sequences,
                config=self._found.checkpoint.config,
                read=self._found.checkpoint.read,
                ops=ops,
                dtype=dtype,
                verification=self._options.verification,
                block_drafter=None if inside is None else inside.block_drafter,
            )
        )
        known = {"embedding", *(f"layer.{layer}" for layer in range(spec.num_layers))}
        if unknown := sorted(set(drafter.taps) - known):
            raise CompositionError(
                f"drafter {part.name!r} reads {', '.join(unknown)}, but the layers of "
                f"{self._config.model} are layer.0 to layer.{spec.num_layers - 1}"
            )
        if drafter.taps and Feature.TAPS not in offers:
            raise CompositionError(
                f"drafter {part.name!r} reads layers of the target, which its model family does "
                "not hand out (taps)"
            )
        return drafter

    def _budget(
        self,
        spec: ModelSpec,
        accelerator: Accelerator,
        executor: Executor,
        details: Mapping[str, str],
    ) -> Budget:
        facts = (self._shape(spec), sorted(details.items()), self._options.num_threads)
        budget: Budget = self._part(
            Slot.BUDGET,
            BudgetContext(
                max_drafts=self._options.max_drafts,
                step_ms=StepTimes(accelerator, executor, spec, time.perf_counter),
                max_batch_tokens=self._options.max_batch_tokens,
                max_sequences=self._options.max_sequences,
                verification=self._options.verification,
                fingerprint=hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest(),
            ),
        )
        return budget

    def _constraint(
        self, spec: ModelSpec, tokenizer: Tokenizer | None
    ) -> Callable[[], Constraint] | None:
        """Return what makes the compiler of grammars, once, when the first one is asked for."""
        if tokenizer is None or self._plan.part(Slot.CONSTRAINT) is None:
            return None
        context = ConstraintContext(
            vocab_size=spec.vocab_size,
            token_text=tokenizer.bytes_of,
            eos_token_ids=self._ends(spec, tokenizer),
        )
        return _Once(lambda: self._part(Slot.CONSTRAINT, context))

    def _spec(self, dtype: str) -> ModelSpec:
        spec = self._found.describe(
            page_size=self._options.page_size, kv_dtype=self._options.kv_dtype_for(dtype)
        )
        longest = self._config.max_model_len
        if longest is None:
            return spec
        if longest > spec.max_position:
            raise CompositionError(
                f"max_model_len {longest} exceeds the {spec.max_position} positions that "
                f"{self._config.model} was made for"
            )
        return attrs.evolve(spec, max_position=longest)

    def _numerics(
        self, spec: ModelSpec, accelerator: Accelerator, dtype: str
    ) -> tuple[tuple[OpChoice, ...], Attention, str]:
        """Ops, attention, and why rows depend on their batch ("" if they do not).

        Raises:
            CompositionError: independent rows are asked for and cannot be had, or an op is missing.
        """
        wanted = self._options.batch_invariant
        device_type = accelerator.device.type
        dependent = "switched off"
        if wanted is not False:
            try:
                ops = plan_ops(self._plan, dtype, device_type, invariant=True)
                return ops, self._attention(spec, accelerator, dtype, invariant=True), ""
            except CompositionError as error:
                if wanted is True:
                    raise
                dependent = "; ".join(error.problems) or str(error)
        ops = plan_ops(self._plan, dtype, device_type, invariant=False)
        return ops, self._attention(spec, accelerator, dtype, invariant=False), dependent

    def _attention(
        self, spec: ModelSpec, accelerator: Accelerator, dtype: str, *, invariant: bool
    ) -> Attention:
        attention: Attention = self._part(
            Slot.ATTENTION,
            AttentionContext(
                groups=spec.groups,
                device_type=accelerator.device.type,
                dtype=dtype,
                num_query_heads=spec.num_query_heads,
                batch_invariant=invariant,
            ),
        )
        return attention

    def _shape(self, spec: ModelSpec) -> dict[str, object]:
        """What decides the form of a model's state, without what its weights contain."""
        config = sorted((key, str(value)) for key, value in self._found.checkpoint.config.items())
        size = self._found.checkpoint.total_bytes
        return {"config": config, "groups": spec.groups, "bytes": size, "torch": torch.__version__}

    def _namespace(self, spec: ModelSpec, details: Mapping[str, str], home: Path) -> str:
        """Pages of engines with different namespaces never match; weights are read for stores."""
        path = self._found.checkpoint.path
        kept = self._plan.part(Slot.KV_STORE) is not None
        weights = content_of(path, home / "digests.json") if kept else identity_of(path)
        numerics = {key: details[key] for key in ("dtype", "device", "invariant", "ops")}
        # Attention decides how a page is laid out, and options how numbers in it were computed.
        made_by = {
            str(slot): [(part.name, str(part.config)) for part in self._plan.parts_of(slot)]
            for slot in (Slot.KERNELS, Slot.ATTENTION)
        }
        facts = {**self._shape(spec), **numerics, **made_by, "weights": weights}
        return namespace_of(facts.items())

    def _cache(
        self,
        spec: ModelSpec,
        num_pages: tuple[int, ...],
        storages: Items[GroupStorage],
        details: Mapping[str, str],
        *,
        recompute_tokens: int,
    ) -> Cache:
        home = default_cache_dir(os.environ)  # noqa: TID251 - where the user keeps such files
        namespace = self._namespace(spec, details, home)
        labels = {
            "model": self._config.model,
            "dtype": spec.groups[0].dtype,
            "page_size": str(self._options.page_size),
        }
        store = self._part(
            Slot.KV_STORE,
            KvStoreContext(
                namespace=namespace, clock=time.time, directory=home / "kv", labels=labels
            ),
        )
        if store is not None:
            self._undo.append(store.close)
        cache: Cache = self._part(
            Slot.CACHE,
            CacheContext(
                groups=spec.groups,
                num_pages=num_pages,
                namespace=namespace,
                clock=time.monotonic,
                recompute_tokens=recompute_tokens,
                eviction=self._eviction(),
                kv_store=store,
                export_page=lambda group, page: storages[group].export_page(page),
                import_page=lambda group, page, data: storages[group].import_page(page, data),
            ),
        )
        self._undo.append(cache.close)
        return cache

    def _eviction(self) -> Callable[[], Any] | None:
        part = self._plan.part(Slot.EVICTION)
        if part is None:
            return None
        return lambda: part.build(EvictionContext(clock=time.monotonic))

    def _tokenizer(self) -> tuple[Tokenizer | None, str]:
        try:
            return self._found.checkpoint.tokenizer(), ""
        except DeepInferError as error:
            return None, str(error)

    def _recipe(self, spec: ModelSpec, tokenizer: Tokenizer | None, tokenizer_error: str) -> Any:
        if tokenizer is None:
            raise EngineError(f"this model has no chat recipe: {tokenizer_error}")
        marks = ParserContext(token_of=tokenizer.id_of)
        context = RecipeContext(
            tokenizer=tokenizer,
            chat_template=self._found.checkpoint.chat_template(),
            architecture=self._found.facts.architecture,
            parsers={
                part.name: partial(part.build, marks) for part in self._plan.parts_of(Slot.PARSER)
            },
            eos_token_ids=self._ends(spec, tokenizer),
            max_length=spec.max_position,
        )
        recipe = self._part(Slot.RECIPE, context)
        if recipe is None:
            raise EngineError("this model has no chat recipe: none is composed")
        return recipe

    def _ends(self, spec: ModelSpec, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        named = self._found.checkpoint.generation_config().get("eos_token_id") or ()
        ids = [*named, *spec.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())]
        return tuple(dict.fromkeys(token for token in ids if 0 <= token < spec.vocab_size))


def detokenizers(tokenizer: Tokenizer) -> Callable[..., StreamDetokenizer]:
    """Return a maker of detokenizers: ``(skip_special_tokens, prompt_token_ids)``."""
    names = {f"<0x{byte:02X}>": tokenizer.id_of(f"<0x{byte:02X}>") for byte in range(256)}
    unstable = byte_fallback_ids({name: at for name, at in names.items() if at is not None})

    # Heads are often padded beyond the tokenizer; those ids have no text.
    unnamed = _From(tokenizer.vocab_size)
    skipped = _From(tokenizer.vocab_size, tokenizer.special_ids)

    def make(skip_special: bool, prompt: Items[int] = ()) -> StreamDetokenizer:
        return StreamDetokenizer(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special),
            context_ids=prompt[-CONTEXT_TOKENS:],
            unstable_ids=unstable,
            skip_ids=skipped if skip_special else unnamed,
        )

    return make


class _Once:
    """Makes an object when it is asked for the first time, from whatever thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: Any = None

    def __call__(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


class _From(Container[int]):
    """Ids from ``first`` on, and some others."""

    def __init__(self, first: int, others: Container[int] = ()) -> None:
        self._first, self._others = first, others

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._others or (isinstance(token_id, int) and token_id >= self._first)


def _dtype(config: EngineConfig, accelerator: Accelerator) -> str:
    supported = accelerator.supported_dtypes()
    if config.dtype == AUTO:
        return supported[0]
    if config.dtype not in supported:
        raise CompositionError(
            f"dtype {config.dtype!r} is not supported by accelerator {accelerator.name!r} here",
            [f"supported: {', '.join(supported)}"],
        )
    return config.dtype


def _close(cache: Cache, checkpoint: Checkpoint) -> None:
    """Give back what outlives the last step."""
    try:
        cache.close()
    finally:
        checkpoint.close()


def _describe_groups(spec: ModelSpec, num_pages: tuple[int, ...]) -> str:
    parts = []
    for group, pages in zip(spec.groups, num_pages, strict=True):
        megabytes = pages * group.bytes_per_page / 2**20
        parts.append(
            f"{group.name}: {len(group.layers)} layers, {pages} pages of {group.page_size} tokens, "
            f"{group.dtype}, {megabytes:.0f} MiB"
        )
    return "; ".join(parts)
