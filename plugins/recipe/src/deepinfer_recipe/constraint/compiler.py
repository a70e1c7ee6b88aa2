"""Constraint "xgrammar": compiles grammars with limits of time and size."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from deepinfer_core.errors import RequestError
from deepinfer_core.interfaces.constraint import ConstraintContext
from deepinfer_recipe.constraint.config import XgrammarConfig
from deepinfer_recipe.constraint.matcher import XgrammarMatcher
from deepinfer_recipe.constraint.sources import KINDS, Marks, Source, read_source

MAX_VOCABULARIES = 2
"""Vocabularies that xgrammar is told of: the plain one, and one whose marks of calls have texts."""

_PLACE = re.compile(r"^\[[0-9:]+\] [^ ]+:[0-9]+: ")


def build(config: XgrammarConfig, context: ConstraintContext) -> XgrammarConstraint:
    """Make the constraint."""
    return XgrammarConstraint(config, context)


@frozen(kw_only=True, eq=False)
class Vocabulary:
    """Tokens as xgrammar sees them.

    Attributes:
        compiler: an ``xgrammar.GrammarCompiler``.
        silent: [vocab_size], bool: tokens without a text.
    """

    compiler: Any
    silent: npt.NDArray[np.bool_]


class XgrammarConstraint:
    """Compiles grammars; safe to use from several threads.

    xgrammar is imported, and told the vocabulary, when the first grammar is compiled: an engine
    that is never asked for structured output pays nothing.

    Args:
        config: limits.
        context: the vocabulary.
    """

    def __init__(self, config: XgrammarConfig, context: ConstraintContext) -> None:
        self._config, self._context = config, context
        self._lock = threading.Lock()
        self._setting_up = threading.Lock()
        self._vocabularies: OrderedDict[Marks, Vocabulary] = OrderedDict()
        self._compiling = 0
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._kept_bytes = 0
        self._ends = np.zeros(-(-context.vocab_size // 32), np.int32)

    def kinds(self) -> Sequence[str]:
        """Kinds understood."""
        return tuple(KINDS)

    def compile(self, kind: str, source: Any) -> XgrammarMatcher:
        """Compile a grammar and return a fresh matcher; called off the engine's thread.

        Raises:
            RequestError: the source is bad, too large, or matches nothing, or takes too long to
                compile.
        """
        wanted = read_source(kind, source, self._config)
        vocabulary = self._vocabulary(wanted.marks)
        compiled = self._cached(wanted.key)
        if compiled is not None:
            return self._matcher(compiled, vocabulary)
        compiled = self._compile_in_time(kind, wanted, vocabulary.compiler)
        matcher, mask = self._matcher(compiled, vocabulary), np.empty_like(self._ends)
        matcher.fill_mask(mask)
        if not mask.any():
            raise RequestError(f"the {kind} matches nothing: no text can begin as it wants")
        self._keep(wanted.key, compiled)
        return matcher

    # ------------------------------------------------------------------------ inside

    def _matcher(self, compiled: Any, vocabulary: Vocabulary) -> XgrammarMatcher:
        import xgrammar

        return XgrammarMatcher(xgrammar.GrammarMatcher(compiled), vocabulary.silent, self._ends)

    def _compile_in_time(self, kind: str, source: Source, compiler: Any) -> Any:
        """Compile in a thread that is given up when it takes too long.

        A thread cannot be killed; those that were given up count until they end, so that hostile
        grammars can occupy no more than ``max_compiling`` threads.
        """
        with self._lock:
            if self._compiling >= self._config.max_compiling:
                raise RequestError(
                    f"{self._compiling} grammars are being compiled already; try again later"
                )
            self._compiling += 1
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(
                    getattr(compiler, source.method)(source.argument, **source.options)
                )
            except Exception as error:
                future.set_exception(error)
            finally:
                with self._lock:
                    self._compiling -= 1

        threading.Thread(target=work, name="deepinfer-grammar", daemon=True).start()
        limit_s = self._config.compile_timeout_s
        try:
            compiled = future.result(limit_s)
        except TimeoutError:
            raise RequestError(
                f"the {kind} takes longer than {limit_s:g} s to compile; make it simpler"
            ) from None
        except Exception as error:
            raise RequestError(f"the {kind} cannot be compiled: {_reason(error)}") from error
        if compiled.memory_size_bytes > self._config.max_compiled_bytes:
            raise RequestError(
                f"the {kind} compiles to {compiled.memory_size_bytes} bytes; at most "
                f"{self._config.max_compiled_bytes} are allowed here"
            )
        return compiled

    def _vocabulary(self, marks: Marks) -> Vocabulary:
        with self._setting_up:
            found = self._vocabularies.pop(marks, None) or self._make_vocabulary(marks)
            self._vocabularies[marks] = found
            while len(self._vocabularies) > MAX_VOCABULARIES:
                self._vocabularies.popitem(last=False)
            return found

    def _make_vocabulary(self, marks: Marks) -> Vocabulary:
        import xgrammar

        context = self._context
        texts = [context.token_text(token_id) for token_id in range(context.vocab_size)]
        for token_id, spelling in marks:
            if token_id < len(texts):
                texts[token_id] = spelling.encode()
        silent = np.array([not text for text in texts], np.bool_)
        words = self._ends.view(np.uint32)
        for token_id in context.eos_token_ids:
            silent[token_id] = False
            words[token_id // 32] |= np.uint32(1 << (token_id % 32))
        info = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=context.vocab_size,
            stop_token_ids=list(context.eos_token_ids),
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return Vocabulary(compiler=compiler, silent=silent)

    def _cached(self, key: str) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: str, compiled: Any) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = compiled
            self._kept_bytes += compiled.memory_size_bytes
            while self._kept_bytes > self._config.cache_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.memory_size_bytes


def _reason(error: Exception) -> str:
    """Return what xgrammar says, without its own file names."""
    return _PLACE.sub("", str(error).strip()) or type(error).__name__
