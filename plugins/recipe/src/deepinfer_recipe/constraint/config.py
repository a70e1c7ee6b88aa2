"""Options of the ``xgrammar`` constraint."""

from __future__ import annotations

from attrs import field, frozen, validators

from deepinfer_core.typed import typed


@frozen(kw_only=True, field_transformer=typed)
class XgrammarConfig:
    """Limits of what may be compiled.

    Attributes:
        compile_timeout_s: a grammar that takes longer is refused.
        max_source_bytes: largest source, as UTF-8; JSON sources are measured as JSON.
        max_depth: deepest nesting of a JSON source.
        max_compiled_bytes: largest compiled grammar.
        max_compiling: grammars that may be compiled at the same time; more are refused.
        cache_bytes: compiled grammars kept for the next request that asks for the same.
        max_whitespace: longest run of whitespace between the parts of JSON.
    """

    compile_timeout_s: float = field(default=10.0, validator=validators.gt(0))
    max_source_bytes: int = field(default=65_536, validator=validators.ge(1))
    max_depth: int = field(default=64, validator=validators.ge(1))
    max_compiled_bytes: int = field(default=64 * 2**20, validator=validators.ge(1))
    max_compiling: int = field(default=4, validator=validators.ge(1))
    cache_bytes: int = field(default=64 * 2**20, validator=validators.ge(0))
    max_whitespace: int = field(default=40, validator=validators.ge(1))
