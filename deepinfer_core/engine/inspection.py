"""What a checkpoint holds and what running it takes, from headers and configuration alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from attrs import frozen

from deepinfer_core.checkpoint.coverage import KNOWN_BUFFERS, check_coverage
from deepinfer_core.checkpoint.tensors import Kept, WeightSpec
from deepinfer_core.config import EngineConfig
from deepinfer_core.engine.model_facts import architecture_of, family_of, open_checkpoint
from deepinfer_core.errors import CheckpointError, CompositionError
from deepinfer_core.interfaces.checkpoint import Checkpoint
from deepinfer_core.interfaces.model import ModelSpec
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind, dtype_bytes
from deepinfer_core.plugins import PluginHost

_CONTAINERS = ("model", "language_model", "transformer")
_BLOCKS, _SCALES = "_blocks", "_scales"


@frozen(kw_only=True)
class Stored:
    """One tensor as stored.

    Attributes:
        name: as in the checkpoint.
        parameters: numbers it stands for; scales count as none.
        num_bytes: its size.
        format: as in ``TensorInfo.format``.
    """

    name: str
    parameters: int
    num_bytes: int
    format: str


@frozen(kw_only=True)
class Part:
    """Tensors of one part of the model, of all layers.

    Attributes:
        name: the part, such as "attn" or "mlp.experts".
        tensors: how many there are.
        parameters: numbers in them.
        num_bytes: their size as stored.
        formats: what they are stored as, most bytes first.
    """

    name: str
    tensors: int
    parameters: int
    num_bytes: int
    formats: tuple[str, ...]


@frozen(kw_only=True)
class Memory:
    """Bytes of the weights while the model runs; experts are spread over the devices.

    Attributes:
        dtype: of what is expanded.
        devices: how many share the experts.
        shared: on every device.
        experts: of all devices together.
        mapped: stays in the files, single rows are read.
    """

    dtype: str
    devices: int
    shared: int
    experts: int
    mapped: int

    @property
    def per_device(self) -> int:
        """Bytes on the device that holds most."""
        return self.shared + -(-self.experts // self.devices)


@frozen(kw_only=True)
class GroupMemory:
    """Bytes of the keys and values of one cache group.

    Attributes:
        name: the group.
        layers: layers that own storage.
        per_token: bytes each token of a sequence takes, 0 where that is bounded.
        per_sequence: bytes each sequence takes, however long.
    """

    name: str
    layers: int
    per_token: float
    per_sequence: int


@frozen(kw_only=True)
class Inspection:
    """What is known of a checkpoint.

    Attributes:
        path: the file or folder.
        reader: component that reads it, "" if there is only a configuration.
        architecture: as its configuration names it, "" if it names none.
        parts: what it holds, most bytes first; without weights, what the configuration calls for.
        memory: None if nothing installed builds the architecture.
        groups: likewise empty.
        max_position: longest sequence, in tokens; 0 if not known.
        problems: why the checkpoint cannot be loaded as it is.
    """

    path: str
    reader: str
    architecture: str
    parts: tuple[Part, ...]
    memory: Memory | None
    groups: tuple[GroupMemory, ...]
    max_position: int
    problems: tuple[str, ...]

    @property
    def tensors(self) -> int:
        """How many there are."""
        return sum(part.tensors for part in self.parts)

    @property
    def parameters(self) -> int:
        """Numbers in all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(part.num_bytes for part in self.parts)


def inspect_checkpoint(
    path: Path, config: EngineConfig, host: PluginHost, *, dtype: str = "auto", devices: int = 1
) -> Inspection:
    """Look at a checkpoint; reads headers and configuration only.

    Args:
        path: a file or folder; one with nothing but a config.json will do.
        config: says which reader and model family to use.
        host: the plugins.
        dtype: of the computation; "auto" is the checkpoint's, else float32.
        devices: how many the experts are spread over.

    Raises:
        CheckpointError: it cannot be read at all.
    """
    reader, checkpoint = open_checkpoint(path, config.checkpoint, host, config_only=True)
    try:
        if dtype == "auto":
            dtype = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"))
            dtype = dtype if dtype in ("float16", "bfloat16", "float64") else "float32"
        spec, problems = _describe(checkpoint, config, host, dtype)
        names = checkpoint.names()
        if not names and spec is None:
            raise CheckpointError(f"{path} holds no weights", problems)
        held = list(_held(checkpoint)) if names or spec is None else list(_called_for(spec))
        return Inspection(
            path=str(path),
            reader=reader,
            architecture=spec.architecture if spec else _architecture(checkpoint),
            parts=_parts(held),
            memory=None if spec is None else _memory(spec, held, dtype, devices),
            groups=() if spec is None else tuple(_group(group) for group in spec.groups),
            max_position=0 if spec is None else spec.max_position,
            problems=problems,
        )
    finally:
        checkpoint.close()


def _architecture(checkpoint: Checkpoint) -> str:
    try:
        return architecture_of(checkpoint.config, checkpoint.path)
    except CheckpointError:
        return ""


def _describe(
    checkpoint: Checkpoint, config: EngineConfig, host: PluginHost, dtype: str
) -> tuple[ModelSpec | None, tuple[str, ...]]:
    """The model of a checkpoint, and what keeps it from being loaded."""
    try:
        architecture = architecture_of(checkpoint.config, checkpoint.path)
        family = family_of(architecture, config.model_component, host)
        spec = family.describe(checkpoint.config, page_size=config.engine.page_size, kv_dtype=dtype)
    except (CheckpointError, CompositionError) as error:
        return None, (error.summary, *error.problems)
    if not checkpoint.names():
        return spec, ("there are no weights, only a configuration; fetch the weights",)
    try:
        check_coverage(checkpoint, spec.weights, (*KNOWN_BUFFERS, *spec.ignored_weights))
    except CheckpointError as error:
        return spec, error.problems or (error.summary,)
    return spec, ()


def _held(checkpoint: Checkpoint) -> Iterator[Stored]:
    names = set(checkpoint.names())
    for name in checkpoint.names():
        info = checkpoint.info(name)
        parameters = math.prod(info.shape)
        # MXFP4 as two tensors: bytes of two numbers each, and scales, which are no parameters.
        if name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES in names:
            parameters *= 2
        elif name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in names:
            parameters = 0
        yield Stored(name=name, parameters=parameters, num_bytes=info.num_bytes, format=info.format)


def _called_for(spec: ModelSpec) -> Iterator[Stored]:
    for weight in spec.weights:
        if not weight.optional:
            parameters = math.prod(weight.shape)
            found = weight.formats[0] if weight.formats else "float32"
            num_bytes = weight.stored_bytes or parameters * dtype_bytes(found)
            yield Stored(name=weight.name, parameters=parameters, num_bytes=num_bytes, format=found)


def part_of(name: str) -> str:
    """The part of the model that a tensor belongs to, by its name.

    >>> part_of("model.layers.3.self_attn.q_proj.weight")
    'self_attn'
    >>> part_of("layers.3.ffn.experts.17.w1.weight")
    'ffn.experts'
    >>> part_of("mtp.0.attn.wq_a.weight"), part_of("model.norm.weight")
    ('mtp', 'norms')
    """
    words = name.split(".")
    while len(words) > 1 and words[0] in _CONTAINERS:
        words = words[1:]
    inside = len(words) > 2 and words[0] == "layers" and words[1].isdigit()
    words = words[2:] if inside else words[:1]
    if "norm" in words[0]:
        return "norms"
    if len(words) == 1 and inside:
        return words[0].split("_")[0]
    if len(words) > 1 and "experts" in words[1]:
        return f"{words[0]}.{words[1]}"
    return words[0]


def _parts(held: Iterable[Stored]) -> tuple[Part, ...]:
    by_part: dict[str, list[Stored]] = {}
    for tensor in held:
        by_part.setdefault(part_of(tensor.name), []).append(tensor)
    parts = [
        Part(
            name=name,
            tensors=len(tensors),
            parameters=sum(tensor.parameters for tensor in tensors),
            num_bytes=sum(tensor.num_bytes for tensor in tensors),
            formats=tuple(format_bytes(tensors)),
        )
        for name, tensors in by_part.items()
    ]
    return tuple(sorted(parts, key=lambda part: (-part.num_bytes, part.name)))


def format_bytes(held: Iterable[Stored]) -> dict[str, int]:
    """Bytes by format, most first."""
    found: dict[str, int] = {}
    for tensor in held:
        found[tensor.format] = found.get(tensor.format, 0) + tensor.num_bytes
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _memory(spec: ModelSpec, held: Sequence[Stored], dtype: str, devices: int) -> Memory:
    stored = {tensor.name: tensor.num_bytes for tensor in held}
    shared = experts = mapped = 0
    for weight in spec.weights:
        size = _running_bytes(weight, stored.get(weight.name), dtype)
        if weight.kept is Kept.MAPPED:
            mapped += size
        elif ".experts." in weight.name:
            experts += size
        else:
            shared += size
    return Memory(dtype=dtype, devices=devices, shared=shared, experts=experts, mapped=mapped)


def _running_bytes(weight: WeightSpec, stored: int | None, dtype: str) -> int:
    if stored is None:
        return 0
    return stored if weight.kept is not Kept.DENSE else math.prod(weight.shape) * dtype_bytes(dtype)


def _group(group: CacheGroupSpec) -> GroupMemory:
    token = group.bytes_per_page / group.page_size
    bounded = {GroupKind.WINDOW: group.window * token, GroupKind.STATE: group.bytes_per_page}
    return GroupMemory(
        name=group.name,
        layers=len(group.storage_layers),
        per_token=0.0 if group.kind in bounded else token,
        per_sequence=round(bounded.get(group.kind, 0)),
    )
