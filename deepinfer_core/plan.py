"""The outcome of composition: frozen, comparable, printable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import field, frozen

from deepinfer_core import __version__
from deepinfer_core.components import Component, NoConfig, Slot, Verified
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import CompositionError, DeepInferError
from deepinfer_core.hookspecs import API
from deepinfer_core.plugin_sources import BrokenPlugin
from deepinfer_core.plugins import Conflict


@frozen(kw_only=True)
class ModelFacts:
    """What is known of a model before any weight is read.

    Attributes:
        name: as the configuration names it.
        architecture: as in config.json ("LlamaForCausalLM").
        checkpoint: name of the checkpoint component that recognises its files.
        head_dims: the attention head sizes that occur.
        num_query_heads: query heads of a layer, 0 where unknown.
        head_dim: numbers per query head, 0 where unknown.
        groups: its cache groups.
        max_position: longest sequence it was made for, in tokens.
        dtype: dtype of its weights ("bfloat16"), "" where unknown.
        needs: features that attention or cache must offer.
    """

    name: str
    architecture: str
    checkpoint: str = ""
    head_dims: tuple[int, ...] = ()
    num_query_heads: int = 0
    head_dim: int = 0
    groups: tuple[Any, ...] = ()
    max_position: int = 0
    dtype: str = ""
    needs: frozenset[str] = frozenset()


@frozen(kw_only=True)
class Part:
    """A component that takes part.

    Attributes:
        slot: the place it fills.
        component: the component.
        config: its options, an object of ``component.config_type``.
        reason: why it was chosen.
    """

    slot: Slot
    component: Component[Any]
    config: Any
    reason: str

    @property
    def name(self) -> str:
        """The component's name."""
        return self.component.name

    def build(self, context: Any) -> Any:
        """Make the object.

        Raises:
            CompositionError: the component's builder failed; says whose it is.
        """
        try:
            return self.component.build(self.config, context)
        except DeepInferError:
            raise
        except Exception as error:
            raise CompositionError(
                f"{self.slot} {self.name!r} of plugin {self.component.plugin} could not be built: "
                f"{type(error).__name__}: {error}; correct the plugin, or name another {self.slot}"
            ) from error


@frozen(kw_only=True)
class Refusal:
    """A component that was considered and does not take part."""

    slot: Slot
    name: str
    plugin: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.plugin}): {self.reason}"


@frozen(kw_only=True)
class Plan:
    """Which component fills each slot, with which options, and why.

    Attributes:
        config: the configuration, fully resolved.
        parts: in the order of ``Slot``; within a slot that takes several, best first.
        refused: in the order in which they were considered.
        broken: plugins that take no part.
        conflicts: component names that several plugins claim.
        model: what is known of the model, None if composed without one.
        details: what the engine adds once it knows (dtype, memory, cache groups, batch invariance).
    """

    config: EngineConfig
    parts: tuple[Part, ...]
    refused: tuple[Refusal, ...] = ()
    broken: tuple[BrokenPlugin, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    model: ModelFacts | None = None
    details: Mapping[str, str] = field(factory=dict)

    def part(self, slot: Slot) -> Part | None:
        """Return what fills a slot, the best where there are several, or None."""
        return next((part for part in self.parts if part.slot is slot), None)

    def parts_of(self, slot: Slot) -> tuple[Part, ...]:
        """Return everything that fills a slot."""
        return tuple(part for part in self.parts if part.slot is slot)

    def with_details(self, details: Mapping[str, str]) -> Plan:
        """Return the plan with more details."""
        return attrs.evolve(self, details={**self.details, **details})

    @property
    def composition_hash(self) -> str:
        """Digest of everything that processes of one engine must agree on (32 hex digits)."""
        text = json.dumps(self._identity(), sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def config_hash(self) -> str:
        """Digest of the options alone (32 hex digits)."""
        identity = self._identity()
        wanted = [identity["core"], identity["slots"]]
        text = json.dumps(wanted, sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _identity(self) -> dict[str, Any]:
        config = self.config
        core = {
            "seed": config.seed,
            "dtype": config.dtype,
            "max_model_len": config.max_model_len,
            "engine": attrs.asdict(config.engine),
        }
        model = _plain(self.model)
        if model is not None:
            del model["name"]  # processes may find the same model under different paths
        slots = [
            [str(part.slot), part.name, part.component.plugin, _plain(part.config)]
            for part in self.parts
            if part.slot is not Slot.COMMAND
        ]
        return {"api": API, "version": __version__, "core": core, "model": model, "slots": slots}

    def as_dict(self) -> dict[str, Any]:
        """Return the plan in JSON's types; ``deepinfer plan --json`` prints it."""
        from deepinfer_core.structure import unstructure

        slots: dict[str, list[dict[str, Any]]] = {str(slot): [] for slot in Slot}
        for part in self.parts:
            slots[part.slot].append(
                {
                    "component": part.name,
                    "plugin": part.component.plugin,
                    "config": _plain(part.config),
                    "reason": part.reason,
                    "verified": str(part.component.verified),
                }
            )
        return {
            "api": API,
            "composition_hash": self.composition_hash,
            "model": _plain(self.model),
            "engine": unstructure(self.config.engine),
            "slots": slots,
            "refused": [attrs.asdict(item) for item in self.refused],
            "broken": [attrs.asdict(item) for item in self.broken],
            "conflicts": [attrs.asdict(item) for item in self.conflicts],
            "details": dict(self.details),
        }

    def explain(self) -> str:
        """Return the plan as ``deepinfer plan`` prints it."""
        width = max([len(part.name) for part in self.parts], default=4)
        origin = max([len(part.component.plugin) for part in self.parts], default=4)
        lines = [f"composition  {self.composition_hash}"]
        if self.model is None:
            lines.append("model        not looked at (name one to see its parts)")
        else:
            lines.append(f"for          {self.model.architecture} ({self.model.name})")
        for slot in Slot:
            lines += self._explain_slot(slot, width, origin)
        lines += [f"{key:<12} {value}" for key, value in self.details.items()]
        lines += [str(item) for item in (*self.broken, *self.conflicts)]
        return "\n".join(lines)

    def _explain_slot(self, slot: Slot, width: int, origin: int) -> list[str]:
        lines: list[str] = []
        for part in self.parts_of(slot):
            head = "" if lines else str(slot)
            mark = ""
            if part.component.verified in (Verified.EMULATED, Verified.WIRED):
                mark = f" [{part.component.verified}]"
            config = "" if isinstance(part.config, NoConfig) else f"{part.config!r} "
            lines.append(
                f"{head:<12} {part.name:<{width}} {part.component.plugin:<{origin}} "
                f"{config}({part.reason}){mark}"
            )
        refused = [item for item in self.refused if item.slot is slot]
        if refused and not lines:
            lines.append(f"{slot!s:<12} {'-':<{width}} empty")
        return lines + [f"{'':<12} refused: {item}" for item in refused]


def _plain(value: Any) -> Any:
    """Return options in JSON's types, whatever they hold."""
    if attrs.has(type(value)):
        fields = attrs.fields(type(value))
        return {item.name: _plain(getattr(value, item.name)) for item in fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
