"""Options of the model families; light, so that a configuration is checked without torch."""

from __future__ import annotations

from attrs import field, frozen, validators

from deepinfer_core.typed import typed

TRUNCATIONS = ("off", "mask", "compact")
"""What ``decoder`` may be."""


@frozen(kw_only=True, field_transformer=typed)
class V41Options:
    """Options of model ``deepseek-v41``.

    Attributes:
        decoder: what the decoder does with the early rows of a prompt: "compact" drops them, as the
            model is trained for; "mask" computes them with an empty window, which gives the same
            results slowly; "off" computes all.
        decoder_keep: last rows of a prompt that the decoder computes; unset = window and 12 more.
        quant: round what published kernels round, to the bit: rows before they meet a matrix in FP8
            or FP4, and all vectors of caches. Off, numbers keep the dtype of the computation.
    """

    decoder: str = field(default="compact", validator=validators.in_(TRUNCATIONS))
    decoder_keep: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    quant: bool = False
