"""What the ``checkpoint`` slot builds: a reader of one kind of checkpoint.

A ``CheckpointFormat`` recognises a path and opens it; the ``Checkpoint`` it returns speaks Hugging
Face terms (``config.json`` keys, tensor names) whatever the file holds, so that a model needs one
way to load its weights. All methods of a ``Checkpoint`` are called while an engine is being built,
from one thread; none is called per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from deepinfer_core.checkpoint.tensors import PackedTensor, TensorInfo, WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer_core.text.tokenizer import Tokenizer

__all__ = ["Checkpoint", "CheckpointFormat", "PackedTensor", "TensorInfo", "WeightSpec"]


@runtime_checkable
class Checkpoint(Protocol):
    """One opened checkpoint. Weights are mapped or read on demand, never all at once."""

    @property
    def path(self) -> Path:
        """The file or directory that was opened."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's configuration in the terms of a Hugging Face ``config.json``."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        ...

    def names(self) -> tuple[str, ...]:
        """Return the Hugging Face names of all tensors, sorted."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor without reading it.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, dense: packed formats are expanded to float32.

        The result may share memory with the mapped file; callers copy before they write.

        Raises:
            CheckpointError: there is no tensor of this name, or its bytes cannot be used.
        """
        ...

    def read_packed(self, name: str) -> PackedTensor | None:
        """Return the raw blocks of a packed tensor, or None if it is stored dense.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        ...

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer that the checkpoint carries.

        Raises:
            TokenizerError: it carries none, or one of a kind that is not supported.
        """
        ...

    def chat_template(self) -> str | None:
        """Return the Jinja source of the default chat template, or None."""
        ...

    def generation_config(self) -> Mapping[str, Any]:
        """Return sampling defaults and stop ids in ``generation_config.json`` terms; may be empty.

        ``eos_token_id`` is a list of all end ids, or missing.
        """
        ...

    def close(self) -> None:
        """Let go of the files. Tensors that were handed out stay valid. May be called twice."""
        ...


@runtime_checkable
class CheckpointFormat(Protocol):
    """Recognises and opens one kind of checkpoint."""

    def why_not(self, path: Path) -> str | None:
        """Return None if ``open`` is worth trying, else the reason in a few words.

        Looks at names and a few leading bytes only, and never raises for a path that exists.
        """
        ...

    def open(self, path: Path) -> Checkpoint:
        """Open a checkpoint.

        Raises:
            CheckpointError: the files are incomplete, corrupt or of an unknown variety; all
                problems are listed at once.
        """
        ...
