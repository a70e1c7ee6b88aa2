"""Plugins and a configuration into a plan: pure, without weights, without touching a device.

Slots are filled in the order of ``Slot``, each seeing what the earlier ones offer. A component that
is named is never replaced; for ``auto`` the best that fits wins, and every loser keeps its reason.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from attrs import define, field

from deepinfer_core.capabilities import Facts
from deepinfer_core.components import Component, Priority, Slot
from deepinfer_core.config import AUTO, NONE, SLOT_FIELDS, Choice, EngineConfig
from deepinfer_core.errors import CompositionError, ConfigError
from deepinfer_core.plan import ModelFacts, Part, Plan, Refusal
from deepinfer_core.plugins import PluginHost
from deepinfer_core.resolve import OPTIONAL, resolve, typed_options
from deepinfer_core.structure import Misfit, suggest

__all__ = ["DEVICE_NODES", "ModelFacts", "Part", "Plan", "Refusal", "compose"]

AnyComponent = Component[Any]

DEVICE_NODES: Mapping[str, str] = {"/dev/nvidia0": "sm100", "/dev/davinci_manager": "ascend"}
"""Device node -> accelerator that would use it."""

_NAMED = "named in the configuration"
_BY_NAME_ONLY = "is used only when named"
_MODEL_NEEDS = (Slot.ATTENTION, Slot.CACHE)


def compose(
    host: PluginHost,
    config: EngineConfig,
    *,
    model: ModelFacts | None = None,
    node_exists: Callable[[str], bool] = os.path.exists,
) -> Plan:
    """Choose a component for every slot.

    Args:
        host: the plugins.
        config: from Python or a file; need not be resolved.
        model: what is known of the model; without it the slots ``model`` and ``checkpoint`` stay
            empty, and nothing is refused for the model's sake.
        node_exists: whether a device node is there.

    Raises:
        ConfigError: options that do not fit, all of them.
        PluginError: a plugin that is needed is missing or broken, or failed while being asked.
        CompositionError: no component fits a slot (one line per candidate), or the machine has a
            device that ``auto`` would leave idle.
    """
    host.require()
    config = resolve(config, host)
    composer = _Composer(host=host, config=config, model=model, node_exists=node_exists)
    for slot in Slot:
        composer.fill(slot)
    composer.check()
    plan = Plan(
        config=composer.config,
        parts=tuple(composer.parts),
        refused=tuple(composer.refused),
        broken=host.broken,
        conflicts=host.conflicts,
        model=model,
    )
    host.configured(plan.config, plan)
    return plan


@define
class _Composer:
    host: PluginHost
    config: EngineConfig
    model: ModelFacts | None
    node_exists: Callable[[str], bool]
    parts: list[Part] = field(factory=list)
    refused: list[Refusal] = field(factory=list)
    problems: list[str] = field(factory=list)
    facts: Facts = field(init=False)

    def __attrs_post_init__(self) -> None:
        dtype = self.config.dtype
        model = self.model
        if dtype == AUTO:
            dtype = model.dtype if model else ""  # type: ignore[assignment]
        self.facts = Facts(
            dtype=dtype,
            page_size=self.config.engine.page_size,
            architecture=model.architecture if model else "",
            head_dims=model.head_dims if model else (),
            groups=model.groups if model else (),
        )

    def fill(self, slot: Slot) -> None:
        if slot is Slot.MODEL:
            self._fill_model()
        elif slot is Slot.CHECKPOINT:
            self._fill_checkpoint()
        elif slot.many:
            self._fill_many(slot)
        else:
            self._fill_one(slot)
        if slot is Slot.ACCELERATOR:
            self._check_idle_devices()

    def _fill_model(self) -> None:
        """The family that answers to the architecture; its needs count later, not now."""
        if self.model is None:
            return
        choice = self.config.picks(Slot.MODEL)[0]
        architecture = self.model.architecture
        offered = self.host.components(Slot.MODEL)
        pool = [item for item in offered if architecture in item.tags]
        if not choice.is_auto:
            pool = [self.host.find(Slot.MODEL, choice.use)]
        if not pool:
            known = sorted({tag for item in offered for tag in item.tags})
            raise CompositionError(
                f"no model family answers to the architecture {architecture!r}"
                f"{suggest(architecture, known)}",
                [f"known architectures: {', '.join(known) or 'none'}", *self._absent()],
            )
        fitting = self._sift(Slot.MODEL, pool, {"": choice}, named=not choice.is_auto)
        self._take(Slot.MODEL, fitting, choice)

    def _fill_checkpoint(self) -> None:
        if self.model is None or not self.model.checkpoint:
            return
        choice = self.config.picks(Slot.CHECKPOINT)[0]
        found = self.model.checkpoint
        if not choice.is_auto and choice.use != found:
            raise CompositionError(
                f"checkpoint {choice.use!r} is named in the configuration, but {self.model.name} "
                f"is read by {found!r}; name that, or leave checkpoint.use on 'auto'"
            )
        named = not choice.is_auto
        pool = [self.host.find(Slot.CHECKPOINT, found)]
        fitting = self._sift(Slot.CHECKPOINT, pool, {"": choice}, named=True)
        reason = _NAMED if named else "recognises the files"
        self._take(Slot.CHECKPOINT, fitting, choice, reason=reason)

    def _fill_many(self, slot: Slot) -> None:
        """Kernels and parsers: all that are available; observers: those that are named."""
        choices = getattr(self.config, SLOT_FIELDS[slot]) if slot in SLOT_FIELDS else None
        options = {pick.use: pick for pick in choices.picks} if choices else {}
        named = choices is not None and not choices.auto
        if named:
            pool: Sequence[AnyComponent] = [self.host.find(slot, name) for name in options]
        else:
            pool = () if slot is Slot.OBSERVER else self.host.components(slot)
        by_name = named or slot in (Slot.PARSER, Slot.COMMAND)
        fitting = self._sift(slot, pool, options, named=by_name)
        if named and len(fitting) < len(pool):
            refusals = [str(item) for item in self.refused if item.slot is slot]
            raise CompositionError(f"{slot}: not everything that is named can be used", refusals)
        for component in fitting:
            reason = _NAMED if named else "available"
            self._add(slot, component, options.get(component.name, Choice()), reason)

    def _fill_one(self, slot: Slot) -> None:
        choice = self.config.picks(slot)[0]
        offered = self.host.components(slot)
        if choice.use == NONE and slot in OPTIONAL and all(item.name != NONE for item in offered):
            return
        pool = offered if choice.is_auto else (self.host.find(slot, choice.use),)
        fitting = self._sift(slot, pool, {"": choice}, named=not choice.is_auto)
        if fitting or not choice.is_auto or slot not in OPTIONAL:
            self._take(slot, fitting, choice)

    def _sift(
        self,
        slot: Slot,
        pool: Sequence[AnyComponent],
        choices: Mapping[str, Choice],
        *,
        named: bool,
    ) -> list[AnyComponent]:
        """Return the components that fit; record the reason of every other one.

        ``choices`` has their options, by name or, where all are offered the same, under "".
        """
        fitting = []
        for component in pool:
            choice = choices.get(component.name) or choices.get("") or Choice()
            reason = self._why_not(slot, component, choice, named)
            if reason is None:
                fitting.append(component)
            else:
                self._refuse(slot, component, reason)
        return fitting

    def _why_not(
        self, slot: Slot, component: AnyComponent, choice: Choice, named: bool
    ) -> str | None:
        if not named and not component.auto:
            return _BY_NAME_ONLY
        missing = component.needs - self.facts.offered if slot is not Slot.MODEL else frozenset()
        if missing:
            return f"needs {', '.join(sorted(missing))}, which nothing chosen before it offers"
        reason = (
            _ask("available", component.available)
            or _ask_as_configured(component, choice)
            or _ask("fits", component.fits, self.facts)
        )
        if reason is None and slot in _MODEL_NEEDS:
            lacking = self._needed_of(slot) - component.offers
            if lacking:
                return f"does not offer {', '.join(sorted(lacking))}, which the model needs"
        return reason

    def _model_needs(self) -> frozenset[str]:
        family = next((part for part in self.parts if part.slot is Slot.MODEL), None)
        own = family.component.needs if family else frozenset()
        return own | (self.model.needs if self.model else frozenset())

    def _needed_of(self, slot: Slot) -> frozenset[str]:
        """What the model needs and somebody in this slot can give, unless it is given already."""
        on_offer = {feature for item in self.host.components(slot) for feature in item.offers}
        return (self._model_needs() - self.facts.offered) & frozenset(on_offer)

    def _take(
        self, slot: Slot, fitting: list[AnyComponent], choice: Choice, reason: str = ""
    ) -> None:
        """Choose among the components that fit, or refuse to go on."""
        if not fitting:
            refusals = [str(item) for item in self.refused if item.slot is slot]
            what = (
                "nothing fits the slot" if choice.is_auto else f"{choice.use!r} cannot be used in"
            )
            raise CompositionError(
                f"{what} {slot}" if choice.is_auto else f"{what} the slot {slot}",
                [*(refusals or ["no plugin offers one"]), *self._absent()],
            )
        chosen, by = fitting[0], ""
        if len(fitting) > 1:
            chosen, by = self.host.choose(slot, fitting, self.facts)
        if not choice.is_auto:
            reason = reason or _NAMED
        elif by:
            reason = f"chosen by {by}"
        self._add(slot, chosen, choice, reason or f"best that fits, {_band(chosen)}")
        for component in fitting:
            if component is not chosen:
                lost = f"{by} preferred {chosen.name}" if by else f"{chosen.name} comes first"
                self._refuse(slot, component, f"fits, {_band(component)}; {lost}")

    def _absent(self) -> list[str]:
        return [str(item) for item in (*self.host.broken, *self.host.conflicts)]

    def _refuse(self, slot: Slot, component: AnyComponent, reason: str) -> None:
        self.refused.append(
            Refusal(slot=slot, name=component.name, plugin=component.plugin, reason=reason)
        )

    def _add(self, slot: Slot, component: AnyComponent, choice: Choice, reason: str) -> None:
        name = SLOT_FIELDS.get(slot, str(slot))
        options = choice.options
        try:
            options = typed_options(component, options)
        except Misfit as misfit:
            path = f"{name}.{component.name}" if slot.many else name
            self.problems += [str(problem.at(path)) for problem in misfit.found]
        self.parts.append(Part(slot=slot, component=component, config=options, reason=reason))
        changes: dict[str, Any] = {
            "offered": self.facts.offered | component.offers,
            "chosen": {**self.facts.chosen, str(slot): component.name},
        }
        if slot is Slot.ACCELERATOR:
            changes |= {"accelerator": component.name, "device_type": device_type(component)}
        self.facts = attrs.evolve(self.facts, **changes)

    def _check_idle_devices(self) -> None:
        """Never run on the CPU by accident: a device node without its accelerator stops auto."""
        if not self.config.accelerator.is_auto or self.facts.device_type != "cpu":
            return
        idle = [node for node in DEVICE_NODES if self.node_exists(node)]
        if not idle:
            return
        wanted = ", ".join(DEVICE_NODES[node] for node in idle)
        refusals = [str(item) for item in self.refused if item.slot is Slot.ACCELERATOR]
        raise CompositionError(
            f"{' and '.join(idle)} exists, but 'auto' would leave the device idle and run on "
            f"{self.facts.accelerator!r}; to run there say --accelerator {self.facts.accelerator}",
            [*(refusals or [f"no plugin offers the accelerator {wanted}"]), *self._absent()],
        )

    def check(self) -> None:
        """Raise for options that do not fit, and for needs of the model that nobody meets."""
        if self.problems:
            raise ConfigError("invalid configuration", self.problems)
        missing = sorted(self._model_needs() - self.facts.offered) if self.model else []
        if missing:
            family = self.facts.chosen.get(Slot.MODEL, "")
            raise CompositionError(
                f"the model needs what no chosen component offers: {', '.join(missing)}",
                [
                    *(
                        f"{part.slot} {part.name}: offers {_listed(part)}"
                        for part in self.parts
                        if part.slot in _MODEL_NEEDS
                    ),
                    *([f"asked for by model {family!r}"] if family else []),
                ],
            )


def _listed(part: Part) -> str:
    return ", ".join(sorted(part.component.offers)) or "nothing"


def _band(component: AnyComponent) -> str:
    try:
        return f"priority {component.priority:d} ({Priority(component.priority).name.lower()})"
    except ValueError:
        return f"priority {component.priority}"


def _ask(what: str, question: Callable[..., str | None], *arguments: Any) -> str | None:
    """Ask a component why not; one that fails to answer is refused for that."""
    try:
        answer: Any = question(*arguments)
    except (Exception, SystemExit) as error:
        return f"its {what}() failed: {type(error).__name__}: {error}"
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    return f"its {what}() returned {answer!r}, neither None nor a reason"


def _ask_as_configured(component: AnyComponent, choice: Choice) -> str | None:
    """Ask a component whether it runs with its options; others' options are told later."""
    try:
        options = typed_options(component, choice.options)
    except Misfit:
        return None
    return _ask("accepts", component.accepts, options)


def device_type(component: AnyComponent) -> str:
    """Return the torch device type of an accelerator: its first tag, or its name without tags."""
    return min(component.tags, default=component.name)
