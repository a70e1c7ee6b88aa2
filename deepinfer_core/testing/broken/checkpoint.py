"""Wrong checkpoint formats: the builtin safetensors reader with something changed."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from deepinfer_core.checkpoint.safetensors import SafetensorsCheckpoint, SafetensorsFormat
from deepinfer_core.checkpoint.tensors import PackedTensor, TensorInfo
from deepinfer_core.errors import CheckpointError
from deepinfer_core.testing.contracts.base import Factory
from deepinfer_core.text.tokenizer import Tokenizer


class _ShapeLies(SafetensorsCheckpoint):
    def info(self, name: str) -> TensorInfo:
        info = super().info(name)
        return attrs.evolve(info, shape=info.shape[::-1])


class _Widens(SafetensorsCheckpoint):
    def read(self, name: str) -> Tensor:
        return super().read(name).float()


class _Rounds(SafetensorsCheckpoint):
    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        return tensor.bfloat16().to(tensor.dtype)


class _Transposes(SafetensorsCheckpoint):
    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        return tensor.t().contiguous().view(tensor.shape) if tensor.dim() == 2 else tensor


class _MakesUpZeros(SafetensorsCheckpoint):
    def read(self, name: str) -> Tensor:
        return super().read(name) if name in self.names() else torch.zeros(12, 12)


class _NamesUnsorted(SafetensorsCheckpoint):
    def names(self) -> tuple[str, ...]:
        return super().names()[::-1]


class _NamesWithoutHead(SafetensorsCheckpoint):
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in super().names() if name != "lm_head.weight")


class _OneBuffer(SafetensorsCheckpoint):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._buffer = torch.empty(4096)

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        shared = self._buffer.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
        return shared.copy_(tensor)


class _WipesOnClose(SafetensorsCheckpoint):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._handed_out: list[Tensor] = []

    def read(self, name: str) -> Tensor:
        tensor = super().read(name).clone()
        self._handed_out.append(tensor)
        return tensor

    def close(self) -> None:
        super().close()
        for tensor in self._handed_out:
            tensor.zero_()


class _ClosesOnce(SafetensorsCheckpoint):
    def close(self) -> None:
        if not self._shards:
            raise CheckpointError("closed already")
        super().close()


class _ClosesAll(SafetensorsCheckpoint):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._opened: list[SafetensorsCheckpoint] = _Shared.opened
        self._opened.append(self)

    def close(self) -> None:
        for other in self._opened:
            other._shards.clear()


class _Shared:
    """What ``_ClosesAll`` wrongly has in common."""

    opened: list[SafetensorsCheckpoint] = []  # noqa: RUF012 sharing is the fault


class _PacksDense(SafetensorsCheckpoint):
    def read_packed(self, name: str) -> PackedTensor | None:
        tensor = self.read(name)
        return PackedTensor(
            format=str(tensor.dtype),
            data=tensor.view(torch.uint8),
            shape=tuple(tensor.shape),
            block_size=1,
            bytes_per_block=tensor.element_size(),
        )


class _RaisesKeyError(SafetensorsCheckpoint):
    def info(self, name: str) -> TensorInfo:
        if name not in self.names():
            raise KeyError(name)
        return super().info(name)


class _OwnTerms(SafetensorsCheckpoint):
    @property
    def config(self) -> Mapping[str, Any]:
        found = dict(super().config)
        found["n_layers"] = found.pop("num_hidden_layers")
        return MappingProxyType(found)


class _EndIsANumber(SafetensorsCheckpoint):
    def generation_config(self) -> Mapping[str, Any]:
        return {"eos_token_id": super().generation_config()["eos_token_id"][0]}


class _NoTokenizerIsNone(SafetensorsCheckpoint):
    def tokenizer(self) -> Tokenizer:
        return None  # type: ignore[return-value]


class _FillsUp(SafetensorsFormat):
    """Pads files that are too short with zeros."""

    def open(self, path: Path) -> SafetensorsCheckpoint:
        file = path / "model.safetensors"
        data = file.read_bytes()
        try:
            (length,) = struct.unpack("<Q", data[:8])
            header = json.loads(data[8 : 8 + length])
            ends = [value["data_offsets"][1] for value in header.values()]
            file.write_bytes(data.ljust(8 + length + max(ends), b"\0"))
        except (ValueError, struct.error) as error:
            raise CheckpointError(f"{file} has no header") from error
        return super().open(path)


class _TrustsTheHeader(SafetensorsFormat):
    def open(self, path: Path) -> SafetensorsCheckpoint:
        data = (path / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        json.loads(data[8 : 8 + length])
        return super().open(path)


class _TakesEverything(SafetensorsFormat):
    def why_not(self, path: Path) -> str | None:
        return None


class _LooksInsideFirst(SafetensorsFormat):
    def why_not(self, path: Path) -> str | None:
        return None if (path / "config.json").read_text() else "an empty configuration"


def _opening(checkpoint: type[SafetensorsCheckpoint]) -> Factory:
    class Opens(SafetensorsFormat):
        def open(self, path: Path) -> SafetensorsCheckpoint:
            return checkpoint(path)

    return lambda context: Opens()


CORRECT: Factory = _opening(SafetensorsCheckpoint)

BROKEN: dict[str, tuple[Factory, str]] = {
    "shapes lie": (_opening(_ShapeLies), "test_descriptions_agree_with_the_tensors"),
    "dtypes change": (_opening(_Widens), "test_tensors_come_back_as_written"),
    "numbers are rounded": (_opening(_Rounds), "test_tensors_come_back_as_written"),
    "matrices are read by columns": (_opening(_Transposes), "test_tensors_come_back_as_written"),
    "missing tensors are zero": (_opening(_MakesUpZeros), "test_unknown_names_are_refused"),
    "names are not sorted": (_opening(_NamesUnsorted), "test_all_names_are_listed"),
    "a name is missing": (_opening(_NamesWithoutHead), "test_all_names_are_listed"),
    "one buffer for all tensors": (_opening(_OneBuffer), "test_reading_again_gives_the_same"),
    "close wipes tensors": (_opening(_WipesOnClose), "test_tensors_outlive_the_checkpoint"),
    "close works once": (_opening(_ClosesOnce), "test_tensors_outlive_the_checkpoint"),
    "close closes others": (_opening(_ClosesAll), "test_checkpoints_are_independent"),
    "dense tensors come packed": (
        _opening(_PacksDense),
        "test_descriptions_agree_with_the_tensors",
    ),
    "unknown names raise KeyError": (_opening(_RaisesKeyError), "test_unknown_names_are_refused"),
    "the configuration has its own terms": (
        _opening(_OwnTerms),
        "test_the_configuration_is_in_hugging_face_terms",
    ),
    "the end id is a number": (_opening(_EndIsANumber), "test_end_ids_are_a_list"),
    "no tokenizer is None": (_opening(_NoTokenizerIsNone), "test_a_missing_tokenizer_is_reported"),
    "short files are filled up": (lambda context: _FillsUp(), "test_truncated_files_are_refused"),
    "garbage raises other errors": (
        lambda context: _TrustsTheHeader(),
        "test_garbage_is_refused",
    ),
    "everything is recognised": (
        lambda context: _TakesEverything(),
        "test_other_paths_get_a_reason",
    ),
    "recognition raises": (lambda context: _LooksInsideFirst(), "test_other_paths_get_a_reason"),
}
