"""What an engine is configured with: frozen values, from Python or from a file.

``config_file`` reads files, ``resolve`` gives the options of components their types. Nothing is
configured by environment variables except the accelerator, see ``apply_environ``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
from attrs import field, frozen

from deepinfer_core.components import NoConfig, Slot
from deepinfer_core.errors import ConfigError
from deepinfer_core.typed import as_tuple, typed

AUTO = "auto"
NONE = "none"
DEFAULT_MODEL = "smollm2-135m-instruct"
ACCELERATOR_VARIABLE = "DEEPINFER_ACCELERATOR"
ACCELERATOR_VALUES = {"sm100": "sm100", "nvidia": "sm100", "ascend": "ascend", "cpu": "cpu"}


@frozen(kw_only=True, eq=False, field_transformer=typed)
class Choice:
    """Which component fills a slot, and its options.

    Attributes:
        use: the component's name; ``"auto"`` for the best that fits; ``""`` where the type of
            ``options`` says which.
        options: an object of the component's config class, or the raw table of a file.
    """

    __accepts__: ClassVar[str] = (
        "a component's name, an object of its config class, or a Choice with both"
    )

    use: str = AUTO
    options: Any = field(factory=dict)

    @classmethod
    def __structure__(cls, value: Any) -> Choice:
        """Read a table of a file: ``use``, the rest are options."""
        from deepinfer_core.structure import structure

        table = structure(value, Mapping[str, Any])
        use = structure({"use": table.pop("use", AUTO)}, _Use).use
        return cls(use=use, options=table)

    @property
    def is_auto(self) -> bool:
        """Whether the choice is left to composition."""
        return self.use == AUTO

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Choice):
            return NotImplemented
        same_use = self.use == other.use or "" in (self.use, other.use)
        return same_use and bool(self.options == other.options)

    def __hash__(self) -> int:
        return hash(type(self.options).__name__)


@frozen(kw_only=True, field_transformer=typed)
class Choices:
    """Which components serve a slot side by side, and their options.

    Attributes:
        auto: True leaves the choice to composition; ``picks`` then only carry options.
        picks: the components named, in order.
    """

    __accepts__: ClassVar[str] = "'auto', or a sequence of components, each as one slot takes it"

    auto: bool = True
    picks: tuple[Choice, ...] = ()

    @classmethod
    def __structure__(cls, value: Any) -> Choices:
        """Read a table of a file: ``use`` is "auto" or names; sub-tables are their options."""
        from deepinfer_core.structure import Misfit, Problem, structure

        table = structure(value, Mapping[str, Any])
        use = structure({"use": table.pop("use", AUTO)}, _UseMany).use
        problems = [
            Problem(key, f"options of a component belong into a table of its name, not {key!r}")
            for key, options in table.items()
            if not isinstance(options, Mapping)
        ]
        names: tuple[str, ...] = (use,) if isinstance(use, str) else use
        if use != AUTO:
            problems += [
                Problem(key, f"{key!r} has options but is not in use")
                for key, options in table.items()
                if key not in names and isinstance(options, Mapping)
            ]
        if problems:
            raise Misfit(problems)
        picked = tuple(table) if use == AUTO else names
        picks = tuple(Choice(use=name, options=dict(table.get(name, {}))) for name in picked)
        return cls(auto=use == AUTO, picks=picks)


@frozen(kw_only=True)
class _Use:
    use: str


@frozen(kw_only=True)
class _UseMany:
    use: str | tuple[str, ...]


def to_choice(value: Any) -> Any:
    """Accept a ``Choice``, a component's name, or an object of its config class.

    Anything else passes unchanged, for the field's validator to refuse by its name.
    """
    if isinstance(value, str):
        return Choice(use=value)
    if attrs.has(type(value)) and not isinstance(value, Choice | Choices):
        return Choice(use="", options=value)
    return value


def to_choices(value: Any) -> Any:
    """Accept ``Choices``, "auto", or what ``to_choice`` accepts, once or in any sequence."""
    if isinstance(value, Choices):
        return value
    if isinstance(value, str) and value == AUTO:
        return Choices()
    single = isinstance(value, str | Mapping) or not isinstance(value, Iterable)
    picks = tuple(map(to_choice, [value] if single else value))
    fitting = all(isinstance(pick, Choice) for pick in picks)
    return Choices(auto=False, picks=picks) if fitting else value


@frozen(kw_only=True, field_transformer=typed)
class PluginsConfig:
    """The table ``[plugins]``.

    Attributes:
        disabled: names of installed plugins that are not loaded; one that is not installed is told,
            not refused.
        required: plugins that must be there, as requirements ("deepinfer-prefix>=0.1") or names.
        load: importable modules that are plugins without being installed as such.
    """

    disabled: tuple[str, ...] = field(default=(), converter=as_tuple)
    required: tuple[str, ...] = field(default=(), converter=as_tuple)
    load: tuple[str, ...] = field(default=(), converter=as_tuple)


MOST_THREADS = 1024
"""More computing threads than any machine has cores for; asking for too many ends a process."""


def _from(low: int, *, high: float = float("inf")) -> Callable[..., None]:
    """Make a validator: a number from ``low`` to ``high``, where one is given."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: int | None) -> None:
        if value is not None and value < low:
            raise ConfigError(f"{attribute.name!r} must be >= {low}: {value}")
        if value is not None and value > high:
            raise ConfigError(f"{attribute.name!r} must be <= {high}: {value}")

    return check


def _positive(instance: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(f"{attribute.name!r} must be above 0 and finite: {value}")


@frozen(kw_only=True, field_transformer=typed)
class EngineOptions:
    """The table ``[engine]``: limits of the core itself.

    Attributes:
        max_batch_tokens: token rows of one step, at most.
        max_sequences: sequences that run at the same time, at most.
        max_waiting: requests that may wait; further ones are refused.
        page_size: tokens per page of the KV cache, a power of two.
        kv_dtype: dtype of stored keys and values; "auto" = that of computing. "int8" has a scale
            for each vector, and is less exact than the others.
        kv_memory_bytes: memory for the KV cache, in bytes; unset = by ``memory_fraction``.
        kv_pages: pages of the KV cache, instead of ``kv_memory_bytes``.
        memory_fraction: share of the memory that is free once weights are loaded, for the KV cache.
        batch_invariant: whether a row's numbers must not depend on what else is in its batch;
            "auto" = wherever the chosen kernels can.
        overlap: whether the host works on one step while the device runs the next;
            "auto" = wherever the device is not the host itself.
        max_drafts: draft tokens of one sequence that a step verifies, at most; without a drafter
            nothing is drafted.
        verification: how drafts are judged. "coupled" accepts a draft if the target draws the same
            token anyway, so that outputs do not depend on drafts at all; "rejection" accepts most,
            and keeps the distribution of outputs.
        grammar_timeout_s: seconds that compiling the grammar of a structured output may take.
        grammar_max_bytes: size of such a grammar, at most.
        step_retries: how often a failed step is repeated without the rows admitted in it before the
            failure is bisected.
        deadline_s: seconds after which a request that says nothing else ends; unset = never.
        num_threads: host threads for computing, at most 1024; 0 = the device's choice.
    """

    max_batch_tokens: int = field(default=2048, validator=_from(1))
    max_sequences: int = field(default=256, validator=_from(1))
    max_waiting: int = field(default=4096, validator=_from(0))
    page_size: int = field(default=64)
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = field(default=AUTO)
    kv_memory_bytes: int | None = field(default=None, validator=_from(1))
    kv_pages: int | None = field(default=None, validator=_from(1))
    memory_fraction: float = field(default=0.5)
    batch_invariant: bool | Literal["auto"] = field(default=AUTO)
    overlap: bool | Literal["auto"] = field(default=AUTO)
    max_drafts: int = field(default=7, validator=_from(1))
    verification: Literal["coupled", "rejection"] = field(default="coupled")
    grammar_timeout_s: float = field(default=10.0, validator=_positive)
    grammar_max_bytes: int = field(default=1 << 18, validator=_from(1))
    step_retries: int = field(default=1, validator=_from(0))
    deadline_s: float | None = field(default=None, validator=_positive)
    num_threads: int = field(default=0, validator=_from(0, high=MOST_THREADS))

    @page_size.validator
    def _check_page_size(self, attribute: attrs.Attribute[int], value: int) -> None:
        if not 1 <= value <= 4096 or value & (value - 1):
            raise ConfigError(f"'page_size' must be a power of two from 1 to 4096: {value}")

    @memory_fraction.validator
    def _check_fraction(self, attribute: attrs.Attribute[float], value: float) -> None:
        if not 0 < value <= 0.95:
            raise ConfigError(f"'memory_fraction' must be above 0 and at most 0.95: {value}")

    def kv_dtype_for(self, dtype: str) -> str:
        """Return the dtype of keys and values where ``dtype`` is that of computing."""
        return dtype if self.kv_dtype == AUTO else self.kv_dtype

    def __attrs_post_init__(self) -> None:
        if self.kv_memory_bytes is not None and self.kv_pages is not None:
            raise ConfigError("'kv_memory_bytes' and 'kv_pages' both size the KV cache; set one")


@frozen(kw_only=True, field_transformer=typed)
class EngineConfig:
    """Everything an engine is made from.

    A slot takes a component's name, an object of its config class (whose type names it), a
    ``Choice`` with both, or "auto". ``kernels``, ``parser`` and ``observer`` take several.

    Attributes:
        model: path of a checkpoint, a registered name, or a hub id.
        seed: of everything random that a request does not seed itself, 0 or more.
        dtype: computation dtype, "auto" = what the accelerator does best with this checkpoint.
        max_model_len: longest sequence in tokens; unset = what the model was made for.
        plugins: which plugins take part.
        engine: limits of the core.
        model_component: slot ``model``; "auto" picks by architecture.
    """

    model: str = field(default=DEFAULT_MODEL)
    seed: int = field(default=0, validator=_from(0))
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(default=AUTO)
    max_model_len: int | None = field(default=None, validator=_from(1))
    plugins: PluginsConfig = field(factory=PluginsConfig)
    engine: EngineOptions = field(factory=EngineOptions)
    model_component: Choice = field(
        factory=Choice, converter=to_choice, metadata={"slot": Slot.MODEL}
    )
    checkpoint: Choice = field(
        factory=Choice, converter=to_choice, metadata={"slot": Slot.CHECKPOINT}
    )
    accelerator: Choice = field(
        factory=Choice, converter=to_choice, metadata={"slot": Slot.ACCELERATOR}
    )
    kernels: Choices = field(factory=Choices, converter=to_choices, metadata={"slot": Slot.KERNELS})
    attention: Choice = field(
        factory=Choice, converter=to_choice, metadata={"slot": Slot.ATTENTION}
    )
    kv_store: Choice = field(factory=Choice, converter=to_choice, metadata={"slot": Slot.KV_STORE})
    eviction: Choice = field(factory=Choice, converter=to_choice, metadata={"slot": Slot.EVICTION})
    cache: Choice = field(factory=Choice, converter=to_choice, metadata={"slot": Slot.CACHE})
    scheduler: Choice = field(
        factory=Choice, converter=to_choice, metadata={"slot": Slot.SCHEDULER}
    )
    drafter: Choice = field(factory=Choice, converter=to_choice, metadata={"slot": Slot.DRAFTER})
    budget: Choice = field(factory=Choice, converter=to_choice, metadata={"slot": Slot.BUDGET})
    constraint: Choice = field(
        factory=Choice, converter=to_choice, metadata={"slot": Slot.CONSTRAINT}
    )
    parser: Choices = field(factory=Choices, converter=to_choices, metadata={"slot": Slot.PARSER})
    recipe: Choice = field(factory=Choice, converter=to_choice, metadata={"slot": Slot.RECIPE})
    observer: Choices = field(
        factory=Choices, converter=to_choices, metadata={"slot": Slot.OBSERVER}
    )

    @model.validator
    def _check_model(self, attribute: attrs.Attribute[str], value: str) -> None:
        if not value.strip():
            raise ConfigError(f"'model' must be a path, a registered name or a hub id: {value!r}")

    def picks(self, slot: Slot) -> tuple[Choice, ...]:
        """Return what is said of a slot: one choice, or all those of a slot that takes several."""
        value = getattr(self, SLOT_FIELDS[slot])
        return value.picks if isinstance(value, Choices) else (value,)

    def with_picks(self, slot: Slot, picks: Sequence[Choice]) -> EngineConfig:
        """Return a configuration with other choices for a slot."""
        name = SLOT_FIELDS[slot]
        value = getattr(self, name)
        many = isinstance(value, Choices)
        changed: Any = attrs.evolve(value, picks=tuple(picks)) if many else picks[0]
        changes: dict[str, Any] = {name: changed}
        return attrs.evolve(self, **changes)


SLOT_FIELDS: Mapping[Slot, str] = {
    item.metadata["slot"]: item.name
    for item in attrs.fields(EngineConfig)
    if "slot" in item.metadata
}
"""Slot -> field of ``EngineConfig`` (commands are not chosen, so they have none)."""


def apply_environ(
    config: EngineConfig, environ: Mapping[str, str], *, overridden: bool = False
) -> EngineConfig:
    """Honour ``DEEPINFER_ACCELERATOR``.

    Args:
        config: a configuration whose accelerator may be "auto".
        environ: the process's environment, passed in by the caller.
        overridden: the command line named an accelerator, which goes before the variable.

    Raises:
        ConfigError: the value is unknown, or the configuration names another accelerator.
    """
    value = environ.get(ACCELERATOR_VARIABLE, "").strip()
    if not value:
        return config
    if value.lower() not in ACCELERATOR_VALUES:
        known = ", ".join(ACCELERATOR_VALUES)
        raise ConfigError(f"{ACCELERATOR_VARIABLE}={value!r} is unknown; valid values: {known}")
    if overridden:
        return config
    named, wanted = config.accelerator, ACCELERATOR_VALUES[value.lower()]
    if named.is_auto:
        return attrs.evolve(config, accelerator=Choice(use=wanted, options=named.options))
    if named.use and named.use != wanted:
        raise ConfigError(
            f"{ACCELERATOR_VARIABLE}={value} asks for {wanted!r}, but the configuration names "
            f"accelerator {named.use!r}; unset the variable, or set accelerator.use to 'auto'"
        )
    return config


def to_toml(config: EngineConfig) -> str:
    """Return a configuration as a file that reads back equal.

    Raises:
        ConfigError: a component is named by its config class only; ``resolve`` it first.
    """
    from deepinfer_core.structure import unstructure
    from deepinfer_core.toml_text import dumps

    table: dict[str, Any] = {}
    for item in attrs.fields(EngineConfig):
        value = getattr(config, item.name)
        if isinstance(value, Choice):
            table[item.name] = {"use": _use(item.name, value), **_options(value)}
        elif isinstance(value, Choices):
            uses = [_use(item.name, pick) for pick in value.picks]
            named = {pick.use: _options(pick) for pick in value.picks}
            table[item.name] = {
                "use": AUTO if value.auto else uses,
                **{name: options for name, options in named.items() if options},
            }
        elif value is not None:
            table[item.name] = unstructure(value)
    return dumps(table)


def _use(name: str, choice: Choice) -> str:
    if not choice.use:
        raise ConfigError(
            f"{name} is named by its class {type(choice.options).__name__} only; "
            "call resolve(config, host) before to_toml"
        )
    return choice.use


def _options(choice: Choice) -> dict[str, Any]:
    from deepinfer_core.structure import unstructure

    return {} if isinstance(choice.options, NoConfig) else dict(unstructure(choice.options))
