"""Config classes made from Python: every field holds what it is declared to hold.

Files are checked by ``structure``; these are the same rules for values that exist already, so that
a wrong one is refused where it is given, and not by what uses it first.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from deepinfer_core import values
from deepinfer_core.errors import ConfigError
from deepinfer_core.structure import Problem, describe, name_of_type

Check = Callable[[Any, Any, Any], Any]


def typed(cls: type[Any], fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Let a constructor raise a ``ConfigError`` for a value of another type, or a bad one.

    For ``field_transformer`` of a config class. Types are checked before a field's own validator,
    which may therefore rely on them, and may be one of ``attrs.validators``.
    """
    return [field.evolve(validator=_checked(field.validator)) for field in fields]


def _checked(own: Check | None) -> Check:
    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        attrs.resolve_types(type(instance))
        if not fits(value, attribute.type):
            given = f": {values.shown(value)}" if attribute.repr else ""  # it may be a secret
            raise ConfigError(f"{attribute.name!r} must be {_accepted(attribute.type)}{given}")
        if own is None:
            return
        try:
            own(instance, attribute, value)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error.args[0] if error.args else error)) from error

    return check


def as_tuple(value: Any) -> Any:
    """Accept any sequence where a tuple is declared; ``converter`` of a field of a typed class."""
    single = isinstance(value, str | Mapping) or not isinstance(value, Iterable)
    return value if single else tuple(value)


def fits(value: object, type_: Any) -> bool:
    """Say whether a value is what an annotation says.

    >>> fits(True, int), fits(3, float), fits(("a", 1), tuple[str, ...])
    (False, True, False)
    """
    origin, inner = get_origin(type_), get_args(type_)
    if origin in (Union, types.UnionType):
        return any(fits(value, member) for member in inner)
    if origin is Literal:
        return any(type(value) is type(allowed) and value == allowed for allowed in inner)
    if origin is tuple and inner[-1] is Ellipsis:
        return isinstance(value, tuple | list) and all(fits(item, inner[0]) for item in value)
    if origin in (Mapping, dict):
        return isinstance(value, Mapping) and all(fits(item, inner[1]) for item in value.values())
    if origin is not None:
        return isinstance(value, origin)
    if type_ in (int, float):
        return isinstance(value, int | type_) and not isinstance(value, bool)
    return type_ is Any or isinstance(value, type_)


def misfits(options: Any) -> list[Problem]:
    """Return what is wrong with the fields of an object whose class does not check them itself."""
    attrs.resolve_types(type(options))
    found = [(field, getattr(options, field.name)) for field in attrs.fields(type(options))]
    return [
        Problem(field.name, f"expected {_accepted(field.type)}, got {describe(value)}")
        for field, value in found
        if not fits(value, field.type)
    ]


def _accepted(type_: Any) -> str:
    """Return what a field takes; a class that is made by a converter says it of itself."""
    if attrs.has(type_):
        return str(getattr(type_, "__accepts__", type_.__name__))
    return name_of_type(type_)
