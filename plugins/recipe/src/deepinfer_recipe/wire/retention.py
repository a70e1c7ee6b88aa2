"""For how long a client wants what is computed for it to be kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepinfer_recipe.wire.fields import Fields

HOUR_S = 3600.0

_OPENAI = {"in_memory": None, "in-memory": None, "24h": 24 * HOUR_S}
_ANTHROPIC = {"5m": HOUR_S / 12, "1h": HOUR_S}


def prompt_cache_retention(fields: Fields) -> float | None:
    """Seconds that OpenAI's field asks for; what is in memory only is kept as room allows."""
    fields.text("prompt_cache_key", None)
    return _OPENAI[fields.one_of("prompt_cache_retention", _OPENAI, "in_memory")]


def cache_control(fields: Fields) -> float | None:
    """The most seconds that a ``cache_control`` of Anthropic's asks for, None without any."""
    asked = []
    for holder in _holders(fields):
        control = holder.object("cache_control", None)
        if control is not None:
            control.one_of("type", ("ephemeral",))
            asked.append(_ANTHROPIC[control.one_of("ttl", _ANTHROPIC, "5m")])
    return max(asked, default=None)


def _holders(fields: Fields) -> Iterator[Fields]:
    """Whatever may have a ``cache_control``."""
    yield fields
    yield from fields.objects("tools", ())
    yield from _blocks(fields, "system")
    for message in fields.objects("messages"):
        for block in _blocks(message, "content"):
            yield block
            yield from _blocks(block, "content")


def _blocks(holder: Fields, name: str) -> Sequence[Fields]:
    return holder.objects(name) if isinstance(holder.get(name), list) else ()
