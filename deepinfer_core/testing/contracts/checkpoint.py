"""What every checkpoint format must do: give back what was written, or refuse it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepinfer_core.components import Slot
from deepinfer_core.errors import CheckpointError, TokenizerError
from deepinfer_core.interfaces.checkpoint import Checkpoint, CheckpointFormat
from deepinfer_core.testing.checkpoint_files import (
    TINY_CONFIG,
    WRITERS,
    tiny_tensors,
    write_safetensors,
)
from deepinfer_core.testing.contracts.base import Contract


class CheckpointContract(Contract):
    """Laws of the slot ``checkpoint``. A new format overrides ``write``.

    Attributes:
        allowed_error: largest difference of a tensor from what was written, for lossy formats.
    """

    slot = Slot.CHECKPOINT
    allowed_error: ClassVar[float] = 0.0

    def write(
        self, directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> Path:
        """Write a checkpoint without a tokenizer in the format under test.

        Args:
            directory: where to, may be missing.
            tensors: by Hugging Face name, float32 or float16.
            config: as in ``config.json``.

        Returns:
            The path to open.
        """
        return WRITERS.get(self.component, write_safetensors)(directory, tensors, config)

    def format(self) -> CheckpointFormat:
        """Return the format under test."""
        built: CheckpointFormat = self.make(None)
        return built

    @contextmanager
    def written(self) -> Iterator[Path]:
        """A written checkpoint in a directory of its own."""
        with tempfile.TemporaryDirectory() as directory:
            yield self.write(Path(directory) / "model", tiny_tensors(), TINY_CONFIG)

    @contextmanager
    def opened(self) -> Iterator[Checkpoint]:
        """A written checkpoint, opened, and closed at the end."""
        with self.written() as path:
            checkpoint = self.format().open(path)
            try:
                yield checkpoint
            finally:
                checkpoint.close()

    # ------------------------------------------------------------------------------ recognition

    def test_its_own_files_are_recognised(self) -> None:
        """``why_not`` is None for what the format writes."""
        with self.written() as path:
            reason = self.format().why_not(path)
            assert reason is None, f"{reason}; override `write` for a format of its own"

    def test_other_paths_get_a_reason(self) -> None:
        """``why_not`` says in words why a path is not of the format; it never raises."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "empty").mkdir()
            (directory / "readme.txt").write_text("weights are elsewhere")
            (directory / "nothing").write_bytes(b"")
            (directory / "other").mkdir()
            (directory / "other" / "readme.txt").write_text("and here neither")
            for path in (*directory.iterdir(), directory / "missing"):
                reason = self.format().why_not(path)
                assert isinstance(reason, str), f"{path.name} was taken for a checkpoint"
                assert reason.strip(), f"no words for {path.name}"

    # ---------------------------------------------------------------------------------- tensors

    def test_all_names_are_listed(self) -> None:
        """``names`` are the Hugging Face names of everything that was written, sorted."""
        with self.opened() as checkpoint:
            assert checkpoint.names() == tuple(sorted(tiny_tensors()))

    def test_tensors_come_back_as_written(self) -> None:
        """Shape and numbers are those written, and dense tensors keep their dtype."""
        with self.opened() as checkpoint:
            for name, tensor in tiny_tensors().items():
                found = checkpoint.read(name)
                assert found.shape == tensor.shape, f"{name} is {tuple(found.shape)}"
                if not self.allowed_error:
                    assert found.dtype == tensor.dtype, f"{name} is {found.dtype}"
                error = float((found.double() - tensor.double()).abs().max())
                assert error <= self.allowed_error, f"{name} differs by {error}"

    def test_descriptions_agree_with_the_tensors(self) -> None:
        """``info`` gives name, shape and dtype of what ``read`` returns, and its size."""
        with self.opened() as checkpoint:
            total = 0
            for name in checkpoint.names():
                info, found = checkpoint.info(name), checkpoint.read(name)
                assert (info.name, info.shape) == (name, tuple(found.shape))
                assert f"torch.{info.dtype}" == str(found.dtype), f"{name}: {info.dtype}"
                packed = checkpoint.read_packed(name)
                assert (packed is None) == (info.format == info.dtype), f"{name}: {info.format}"
                if packed is not None:
                    assert (packed.format, packed.shape) == (info.format, info.shape)
                assert info.num_bytes > 0
                total += info.num_bytes
            assert total <= checkpoint.total_bytes

    def test_reading_again_gives_the_same(self) -> None:
        """Reads do not depend on each other, and tensors handed out stay as they are."""
        with self.opened() as checkpoint:
            names = checkpoint.names()
            first = {name: checkpoint.read(name) for name in names}
            copies = {name: tensor.clone() for name, tensor in first.items()}
            for name in reversed(names):
                assert torch.equal(checkpoint.read(name), copies[name]), f"{name}: second read"
            for name in names:
                assert torch.equal(first[name], copies[name]), f"{name} changed after it was read"

    def test_unknown_names_are_refused(self) -> None:
        """``info``, ``read`` and ``read_packed`` raise CheckpointError with the name."""
        with self.opened() as checkpoint:
            for call in (checkpoint.info, checkpoint.read, checkpoint.read_packed):
                message = _refusal(partial(call, "model.no_such.weight"))
                assert "model.no_such.weight" in message, f"refusal: {message!r}"

    def test_tensors_outlive_the_checkpoint(self) -> None:
        """After ``close``, which may be called twice, tensors handed out are still valid."""
        with self.opened() as checkpoint:
            found = {name: checkpoint.read(name) for name in checkpoint.names()}
            copies = {name: tensor.clone() for name, tensor in found.items()}
            checkpoint.close()
            checkpoint.close()
            for name, tensor in found.items():
                assert torch.equal(tensor, copies[name]), f"{name} changed by close"

    def test_checkpoints_are_independent(self) -> None:
        """Closing one of two leaves the other one usable."""
        with self.opened() as first, self.opened() as second:
            first.close()
            name = second.names()[0]
            assert torch.equal(second.read(name), second.read(name))

    # ------------------------------------------------------------------------------- other parts

    def test_the_configuration_is_in_hugging_face_terms(self) -> None:
        """``config`` has the keys of a ``config.json``."""
        keys = (
            "architectures",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
            "rms_norm_eps",
        )
        with self.opened() as checkpoint:
            for key in keys:
                found = checkpoint.config.get(key)
                assert found == TINY_CONFIG[key], f"{key} is {found!r}"

    def test_end_ids_are_a_list(self) -> None:
        """``generation_config`` has ``eos_token_id`` as a list, or not at all."""
        with self.opened() as checkpoint:
            ends = checkpoint.generation_config().get("eos_token_id", [2])
            assert ends == [2], f"eos_token_id is {ends!r}"

    def test_a_missing_tokenizer_is_reported(self) -> None:
        """Without one, ``tokenizer`` raises TokenizerError, and there is no chat template."""
        with self.opened() as checkpoint:
            refused = False
            try:
                checkpoint.tokenizer()
            except TokenizerError:
                refused = True
            assert refused, "a tokenizer came out of a checkpoint without one"
            assert checkpoint.chat_template() is None

    # ----------------------------------------------------------------------------- damaged files

    def test_truncated_files_are_refused(self) -> None:
        """Weights that are cut off anywhere raise CheckpointError; nothing is made up."""
        for share in (0.0, 0.01, 0.3, 0.8, 0.999):
            with self.written() as path:
                file = _largest_file(path)
                data = file.read_bytes()
                file.write_bytes(data[: int(len(data) * share)])
                refusal = _refusal(partial(self.read_all, path))
                assert refusal, f"{share:.1%} of the file were enough"

    def test_garbage_is_refused(self) -> None:
        """Random bytes, whole or behind a valid beginning, raise CheckpointError, nothing else."""
        for kept in (0, 8, 64):
            with self.written() as path:
                file = _largest_file(path)
                data = file.read_bytes()
                file.write_bytes(data[:kept] + Random(kept).randbytes(len(data) - kept))
                refusal = _refusal(partial(self.read_all, path))
                assert refusal, f"garbage behind {kept} bytes was taken for weights"

    def read_all(self, path: Path) -> None:
        """Open a path and read everything in it."""
        checkpoint = self.format().open(path)
        try:
            for name in checkpoint.names():
                checkpoint.read(name)
        finally:
            checkpoint.close()


def _largest_file(path: Path) -> Path:
    if path.is_file():
        return path
    return max(
        (file for file in path.rglob("*") if file.is_file()), key=lambda at: at.stat().st_size
    )


def _refusal(action: Callable[[], Any]) -> str:
    """Message of the CheckpointError that an action raises, or "" if it raises none."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""
