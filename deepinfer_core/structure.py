"""Exact structuring: values of a TOML file into frozen attrs classes, and back.

Nothing is coerced (``"false"`` is no bool, ``4.9`` no int), unknown keys are refused with a
suggestion, and every problem of a value is found at once, each with its path. What options mean
is not known here.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, Union, get_args
from typing import get_origin as _get_origin

import attrs
from attrs import frozen

from deepinfer_core.errors import ConfigError

if TYPE_CHECKING:
    import cattrs

Problems = list["Problem"]


@frozen
class Problem:
    """One thing that is wrong, and where."""

    path: str
    message: str

    def at(self, prefix: str) -> Problem:
        """The same problem seen from further out."""
        glue = "." if self.path and prefix and not self.path.startswith("[") else ""
        return Problem(f"{prefix}{glue}{self.path}", self.message)

    def __str__(self) -> str:
        return f"{self.message} @ {self.path}" if self.path else self.message


class Misfit(ConfigError):
    """A value does not fit its type; ``found`` has the problems with their paths."""

    def __init__(self, found: Iterable[Problem]) -> None:
        self.found = tuple(found)
        super().__init__("invalid value", [str(problem) for problem in self.found])

    def __reduce__(self) -> tuple[type[Misfit], tuple[tuple[Problem, ...]]]:  # type: ignore[override]
        """Pickle by the problems."""
        return type(self), (self.found,)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" or the known names, to end a message about an unknown one."""
    known = sorted(map(str, known))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    close = close or [item for item in known if name and item.startswith(name)]
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else "; there are none"


def describe(value: object) -> str:
    """Return a value as a message shows it: short, in TOML's spelling where they differ."""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _origin(type_: Any) -> Any:
    return _get_origin(type_)


_NAMES = {int: "an integer", float: "a number", str: "a string"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}


def name_of_type(type_: Any) -> str:
    """Return what a type accepts, as messages about files say it."""
    names = list(dict.fromkeys(_alternatives(type_)))
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _alternatives(type_: Any) -> list[str]:
    if _origin(type_) in (Union, types.UnionType):
        members = [member for member in get_args(type_) if member is not type(None)]
        return [name for member in members for name in _alternatives(member)]
    if _origin(type_) is Literal:
        return [describe(value) for value in get_args(type_)]
    if type_ is bool:
        return ["true", "false"]
    if attrs.has(type_) or _origin(type_) in (Mapping, dict):
        return ["a table"]
    if _origin(type_) in (tuple, frozenset):
        items = _PLURALS.get(get_args(type_)[0])
        return ["an array" if items is None else f"an array of {items}"]
    return [_NAMES.get(type_, getattr(type_, "__name__", str(type_)))]


def _refuse(value: object, type_: Any) -> Misfit:
    return Misfit([Problem("", f"expected {name_of_type(type_)}, got {describe(value)}")])


def _exact(*accepted: type) -> Callable[[Any, Any], Any]:
    def structure_exact(value: Any, type_: Any) -> Any:
        if issubclass(type_, Enum):
            return _enum(value, type_)
        if type(value) not in accepted:
            raise _refuse(value, type_)
        return type_(value)

    return structure_exact


def _literal(value: Any, type_: Any) -> Any:
    for allowed in get_args(type_):
        if type(value) is type(allowed) and value == allowed:
            return allowed
    raise _refuse(value, type_)


def _union(value: Any, type_: Any) -> Any:
    members = [member for member in get_args(type_) if member is not type(None)]
    misfits = []
    for member in members:
        try:
            return structure(value, member)
        except Misfit as misfit:
            misfits.append(misfit)
    if len(members) == 1:
        raise misfits[0]
    raise _refuse(value, type_)


def _enum(value: Any, type_: type[Enum]) -> Enum:
    for member in type_:
        same_kind = isinstance(member.value, type(value)) and not isinstance(value, bool)
        if same_kind and member.value == value:
            return member
    allowed = ", ".join(describe(member.value) for member in type_)
    raise Misfit([Problem("", f"expected one of {allowed}, got {describe(value)}")])


def _each(pairs: Iterable[tuple[str, Any, Any]]) -> list[Any]:
    """Structure (path, value, type) triples; raise for all that do not fit together."""
    results: list[Any] = []
    problems: Problems = []
    for path, value, type_ in pairs:
        try:
            results.append(structure(value, type_))
        except Misfit as misfit:
            problems += [problem.at(path) for problem in misfit.found]
    if problems:
        raise Misfit(problems)
    return results


def _array(value: Any, type_: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _refuse(value, type_)
    arguments = get_args(type_)
    if _origin(type_) is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        if len(value) != len(arguments):
            raise Misfit([Problem("", f"expected {len(arguments)} values, got {len(value)}")])
        inner = list(arguments)
    else:
        inner = [arguments[0]] * len(value)
    items = _each((f"[{i}]", item, inner[i]) for i, item in enumerate(value))
    return _origin(type_)(items)


def _table(value: Any, type_: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _refuse(value, type_)
    inner = get_args(type_)[1]
    return dict(
        zip(value, _each((str(key), item, inner) for key, item in value.items()), strict=True)
    )


def _path(value: Any, type_: Any) -> Any:
    if not isinstance(value, str):
        raise Misfit([Problem("", f"expected a path as a string, got {describe(value)}")])
    return type_(value)


def fields_of(type_: type[Any]) -> dict[str, attrs.Attribute[Any]]:
    """Return the fields of a config class that its constructor accepts, types resolved."""
    attrs.resolve_types(type_)
    return {field.alias or field.name: field for field in attrs.fields(type_) if field.init}


def structure_fields(value: Any, type_: type[Any]) -> tuple[dict[str, Any], Problems]:
    """Structure a table field by field; return the good values and every problem."""
    if not isinstance(value, Mapping):
        return {}, list(_refuse(value, type_).found)
    fields = fields_of(type_)
    good: dict[str, Any] = {}
    problems = [
        Problem(key, f"unknown key {key!r}{suggest(key, fields)}")
        for key in value
        if key not in fields
    ]
    for name, field in fields.items():
        if name in value:
            try:
                good[name] = structure(value[name], field.type)
            except Misfit as misfit:
                problems += [problem.at(name) for problem in misfit.found]
        elif field.default is attrs.NOTHING:
            problems.append(Problem(name, "a value is required"))
    for problem in _invalid(type_, fields, good):
        del good[problem.path]
        problems.append(problem)
    return good, problems


def _invalid(
    type_: type[Any], fields: Mapping[str, attrs.Attribute[Any]], good: Mapping[str, Any]
) -> Problems:
    """Run the validators of the given fields one by one: the constructor stops at the first."""
    blank = object.__new__(type_)
    for name, value in good.items():
        object.__setattr__(blank, fields[name].name, value)
    problems = []
    for name, value in good.items():
        validator = fields[name].validator
        if validator is None or fields[name].converter is not None:
            continue
        try:
            validator(blank, fields[name], value)
        except (ValueError, TypeError, ConfigError) as error:
            problems.append(Problem(name, _text(error)))
        except AttributeError:  # it looks at a missing field; the constructor decides
            continue
    return problems


def _text(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return "; ".join(error.problems) or error.summary
    return str(error.args[0]) if error.args else type(error).__name__


def _class(value: Any, type_: type[Any]) -> Any:
    good, problems = structure_fields(value, type_)
    if problems:
        raise Misfit(problems)
    try:
        return type_(**good)
    except (TypeError, ValueError, ConfigError) as error:
        raise Misfit([Problem("", _text(error))]) from error


def _unsupported(value: Any, type_: Any) -> Any:
    raise Misfit([Problem("", f"options of type {type_!r} cannot be read from a file")])


@functools.cache
def _converter() -> cattrs.Converter:
    import cattrs  # slow to import; most starts read no configuration

    converter = cattrs.Converter(forbid_extra_keys=True)
    register = converter.register_structure_hook_func
    # The last one registered is asked first.
    register(lambda type_: True, _unsupported)
    register(lambda type_: type_ is Any or type_ is object, lambda value, _: value)
    register(lambda type_: isinstance(type_, type) and issubclass(type_, Enum), _enum)
    register(lambda type_: isinstance(type_, type) and issubclass(type_, PurePath), _path)
    register(lambda type_: _origin(type_) in (tuple, frozenset), _array)
    register(lambda type_: _origin(type_) in (Mapping, dict), _table)
    register(lambda type_: _origin(type_) in (Union, types.UnionType), _union)
    register(lambda type_: _origin(type_) is Literal, _literal)
    register(attrs.has, _class)
    for exact, accepted in {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.items():
        # cattrs' own hooks for these go before predicates, also for enums derived from them.
        converter.register_structure_hook(exact, _exact(*accepted))
    converter.register_structure_hook(Path, _path)
    return converter


def structure(value: Any, type_: Any) -> Any:
    """Return ``value`` as an instance of ``type_``.

    A class may bring a class method ``__structure__(value)`` that reads it instead.

    Raises:
        Misfit: with every problem and its path.
    """
    reader = getattr(type_, "__structure__", None)
    if reader is not None:
        return reader(value)
    return _converter().structure(value, type_)


def unstructure(value: Any) -> Any:
    """Return a value in TOML's types; None fields are left out."""
    if attrs.has(type(value)):
        fields = fields_of(type(value))
        items = {name: getattr(value, field.name) for name, field in fields.items()}
        return {name: unstructure(item) for name, item in items.items() if item is not None}
    if isinstance(value, Enum):
        return unstructure(value.value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): unstructure(item) for key, item in value.items() if item is not None}
    if isinstance(value, frozenset):
        return sorted(unstructure(item) for item in value)
    if isinstance(value, list | tuple):
        return [unstructure(item) for item in value]
    return value
