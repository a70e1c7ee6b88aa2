"""What differs from chip to chip, behind one object: nothing else asks which chip it runs on."""

from __future__ import annotations

from attrs import frozen

MIN_CANN = (9, 2)
"""Oldest CANN that the calls were written for."""


@frozen(kw_only=True)
class Soc:
    """Limits of one family, as documented.

    Attributes:
        name: of the family.
        dtypes: computation dtypes, best first.
        attention_dtypes: dtypes of fused attention.
        flat_dims: head sizes that fused attention takes as a flat list of tokens (layout TND).
        page_sizes: tokens a page, for prompts.
        head_multiple: what head sizes are multiples of.
        max_heads: most query heads.
        max_heads_per_kv: most query heads that share a key head.
        max_page_row: most numbers of one token in a page (key heads times head size).
        max_graphs: most graphs that are captured at a time.
    """

    name: str
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    attention_dtypes: tuple[str, ...] = ("bfloat16", "float16")
    flat_dims: tuple[int, ...] = (128, 192)
    page_sizes: tuple[int, ...] = (128, 256, 512)
    head_multiple: int = 16
    max_heads: int = 256
    max_heads_per_kv: int = 64
    max_page_row: int = 65535
    max_graphs: int = 4


ASCEND_950 = Soc(name="Ascend 950")

_FAMILIES: tuple[tuple[range, str, Soc | None], ...] = (
    (range(220, 226), "Atlas A2", None),
    (range(250, 256), "Atlas A3", None),
    (range(260, 270), "Ascend 950", ASCEND_950),
)
"""Numbers that torch_npu gives to chips, the family's name, and its limits if it is served."""


def family_of(soc_version: int) -> str:
    """Name of the family that a number of torch_npu belongs to."""
    for numbers, name, _ in _FAMILIES:
        if soc_version in numbers:
            return name
    return f"unknown family {soc_version}"


def soc_of(soc_version: int) -> Soc | None:
    """Limits of a chip, or None where it is not served."""
    for numbers, _, soc in _FAMILIES:
        if soc_version in numbers:
            return soc
    return None
