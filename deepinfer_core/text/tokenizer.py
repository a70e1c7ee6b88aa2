"""Text to token ids and back.

A thin value around the ``tokenizers`` library, built from a Hugging Face directory or from the
metadata of a GGUF file. It adds one thing: control tokens can be kept out of text that a user
wrote (``allow_special=False``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from deepinfer_core import values
from deepinfer_core.errors import RequestError, TokenizerError, reason
from deepinfer_core.text.gguf_tokenizer import tokenizer_from_metadata
from deepinfer_core.text.token_bytes import ByteDecoder, token_bytes

_TOKEN_FIELDS = ("bos_token", "eos_token", "pad_token", "unk_token")
# A blank put before a text belongs to its very beginning, not to a part that follows a token.
_FIRST, _NEVER = '"prepend_scheme":"first"', '"prepend_scheme":"never"'


class Tokenizer:
    """Encodes and decodes; immutable, safe to use from several threads.

    Args:
        backend: a ``tokenizers.Tokenizer``; owned by the new object.
        bos_id: beginning-of-sequence token, if the model has one.
        eos_ids: tokens that end a generation; the first is the main one.
        special_ids: control tokens beyond those that ``backend`` marks as special.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        special_ids: Iterable[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self._backend = backend
        self._prefixes_first_word = _FIRST in _state_of(backend.pre_tokenizer)
        self._twins: dict[bool, tokenizers.Tokenizer] = {}
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        added = backend.get_added_tokens_decoder()
        self._control = {token.content: token for token in added.values() if token.special}
        self._control_ids = {t.content: index for index, t in added.items() if t.special}
        self._control_beginnings = frozenset(
            word[:length] for word in self._control for length in range(1, len(word))
        )
        self._control_pattern = _any_of(self._control)
        self._byte_decoder = (
            ByteDecoder(backend, self._control) if ByteDecoder.serves(backend) else None
        )
        self.special_ids = frozenset(special_ids).union(self._control_ids.values())
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read ``tokenizer.json`` and what stands beside it.

        Args:
            path: a directory in Hugging Face layout.

        Raises:
            TokenizerError: there is no ``tokenizer.json``, or a file cannot be read.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{path} has no tokenizer.json; other tokenizer files (tokenizer.model, "
                "vocab.json) must be converted to it first"
            )
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception for every problem
            raise TokenizerError(f"{file} cannot be read: {reason(error)}") from error
        names = _special_names(path)
        return cls(
            backend,
            bos_id=_id_of_name(backend, names.get("bos_token")),
            eos_ids=_end_ids(path, backend, names.get("eos_token")),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, where: str) -> Tokenizer:
        """Build from the ``tokenizer.ggml.*`` keys of a GGUF file.

        Args:
            metadata: of the file.
            where: the file's name for messages.

        Raises:
            TokenizerError: the keys are incomplete or name a kind that is not supported.
        """
        built = tokenizer_from_metadata(metadata, where)
        return cls(
            built.backend,
            bos_id=built.bos_id,
            eos_ids=built.eos_ids,
            special_ids=built.special_ids,
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: any string.
            add_special_tokens: put the tokens around the text that the model was trained with.
            allow_special: read the spelling of a control token as that token. If False it is
                encoded as the plain characters it consists of, as is right for untrusted text.

        Raises:
            RequestError: the text holds lone surrogates, which no encoding can express.
        """
        backend = self._backend
        if not allow_special and self._may_hold_control(text):
            backend = self._plain_twin(continuation=False)
        return _encode(backend, text, add_special_tokens)

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Return the ids of plain text mixed with control tokens.

        Equal to ``encode(..., add_special_tokens=False)`` of the joined text, except that strings
        never yield a control token, however they are spelled.

        Args:
            parts: strings are plain text, ints are control tokens.

        Raises:
            RequestError: a text holds lone surrogates, or an int is not a control token.
        """
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, str):
                text = self._trimmed(part, parts[index - 1 : index], parts[index + 1 : index + 2])
                ids += self._encode_plain(text, continuation=index > 0) if text else []
            elif part in self.special_ids:
                ids.append(part)
            else:
                raise RequestError(f"token {part} is not a control token")
        return ids

    def find_control_tokens(self, text: str) -> list[tuple[int, int, int]]:
        """Return ``(start, end, token_id)`` of every control token spelled in a text, in order."""
        matches = () if self._control_pattern is None else self._control_pattern.finditer(text)
        return [(m.start(), m.end(), self._control_ids[m.group()]) for m in matches]

    def ends_like_control_token(self, text: str) -> bool:
        """Say whether more text could complete a control token at the end of this one."""
        longest = max(map(len, self._control_beginnings), default=0)
        ends = (text[-length:] for length in range(1, min(longest, len(text)) + 1))
        return any(end in self._control_beginnings for end in ends)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; incomplete characters become U+FFFD.

        Ids without a token add nothing: a model's output may be wider than its vocabulary.

        Raises:
            RequestError: an id is no integer, negative, or needs more than 32 bits.
        """
        try:
            if self._byte_decoder is not None:
                return self._byte_decoder.decode(ids, skip=skip_special_tokens)
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError):
            allowed = f"a sequence of token ids from 0 to {self.vocab_size - 1}"
            raise values.refuse("token ids", ids, allowed) from None

    def token(self, token_id: int) -> str:
        """Return the spelling of a token in the vocabulary (not always readable text).

        Raises:
            RequestError: there is no such token.
        """
        known = 0 <= token_id < self.vocab_size
        token = self._backend.id_to_token(token_id) if known else None
        if token is None:
            raise RequestError(f"there is no token {token_id}")
        return str(token)

    @cached_property
    def bytes_of(self) -> Callable[[int], bytes]:
        """``token id -> bytes`` it stands for; nothing for control tokens and unknown ids."""
        return token_bytes(self._backend, self.special_ids)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its spelling, or None."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def _may_hold_control(self, text: str) -> bool:
        if any(token.normalized for token in self._control.values()):
            return True  # the spelling may only appear once the text is normalised
        return self._control_pattern is not None and bool(self._control_pattern.search(text))

    def _encode_plain(self, text: str, *, continuation: bool) -> list[int]:
        if continuation and self._prefixes_first_word:
            return _encode(self._plain_twin(continuation=True), text, False)
        return self.encode(text, add_special_tokens=False, allow_special=False)

    def _trimmed(self, text: str, before: Sequence[str | int], after: Sequence[str | int]) -> str:
        """Drop the blanks that a neighbouring control token is declared to swallow."""
        if any(isinstance(part, int) and self._strips(part, "rstrip") for part in before):
            text = text.lstrip()
        if any(isinstance(part, int) and self._strips(part, "lstrip") for part in after):
            text = text.rstrip()
        return text

    def _strips(self, token_id: int, side: str) -> bool:
        token = self._control.get(self.token(token_id))
        return token is not None and bool(getattr(token, side))

    def _plain_twin(self, *, continuation: bool) -> tokenizers.Tokenizer:
        """Return a twin that knows no control tokens; built on first use, as few texts need it.

        The library's own switch (``encode_special_tokens``) is a setting of the object, so that
        flipping it per call would make ``encode`` depend on what another thread does.
        """
        if continuation not in self._twins:
            source = self._backend.to_str()
            if continuation:
                source = source.replace(_FIRST, _NEVER)
            twin = tokenizers.Tokenizer.from_str(source)
            twin.encode_special_tokens = True
            self._twins[continuation] = twin
        return self._twins[continuation]


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    except (UnicodeEncodeError, TypeError):
        values.unicode_text("a text", text)  # says which character, as the library does not
        raise


def _state_of(pre_tokenizer: Any) -> str:
    return "" if pre_tokenizer is None else str(pre_tokenizer.__getstate__(), "utf-8")


def _any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Compile a pattern that finds the leftmost word, the longest if several start there."""
    longest_first = sorted((word for word in words if word), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return found


def _special_names(path: Path) -> dict[str, str]:
    """Return the spelling of named control tokens; tokenizer_config.json wins."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        found = _read_json(path / file)
        for field in _TOKEN_FIELDS:
            value = found.get(field)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                names[field] = value
    return names


def _id_of_name(backend: tokenizers.Tokenizer, name: str | None) -> int | None:
    return None if name is None else backend.token_to_id(name)


def _end_ids(path: Path, backend: tokenizers.Tokenizer, name: str | None) -> list[int]:
    """Collect end tokens: the tokenizer's own, then those of the generation and model config."""
    ids: list[Any] = []
    if (own := _id_of_name(backend, name)) is not None:
        ids.append(own)
    for file in ("generation_config.json", "config.json"):
        value = _read_json(path / file).get("eos_token_id")
        if value is not None:
            ids += value if isinstance(value, list) else [value]
            break
    return list(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))
