"""From a model's name to what is known of it before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from deepinfer_core.checkpoint.safetensors import SafetensorsCheckpoint
from deepinfer_core.components import Slot
from deepinfer_core.config import Choice, EngineConfig
from deepinfer_core.errors import CheckpointError, CompositionError
from deepinfer_core.hub.locate import default_cache_dir, find_model, hugging_face_home
from deepinfer_core.interfaces.checkpoint import Checkpoint
from deepinfer_core.interfaces.model import ModelContext, ModelFamily, ModelSpec
from deepinfer_core.plan import ModelFacts
from deepinfer_core.plugins import PluginHost
from deepinfer_core.resolve import typed_options


@frozen(kw_only=True, eq=False)
class FoundModel:
    """A model whose files were looked at.

    Attributes:
        facts: for composition.
        checkpoint: open.
        family: builds it.
        spec: with a provisional cache dtype where that is ``auto``; the engine asks again once the
            dtype is known.
    """

    facts: ModelFacts
    checkpoint: Checkpoint
    family: ModelFamily
    spec: ModelSpec

    def describe(self, *, page_size: int, kv_dtype: str) -> ModelSpec:
        """The spec for a page size and cache dtype."""
        return self.family.describe(self.checkpoint.config, page_size=page_size, kv_dtype=kv_dtype)


def find(
    config: EngineConfig,
    host: PluginHost,
    environ: Mapping[str, str],
    *,
    offline: bool = False,
    config_only: bool = False,
    progress: Any = None,
) -> FoundModel:
    """Locate, open and describe the configured model; reads configuration files only.

    Args:
        config: names the model.
        host: the plugins.
        environ: says where models are kept.
        offline: never touch the network.
        config_only: a configuration without weights will do; the checkpoint then has no tensors.
        progress: told about downloads.

    Raises:
        PullError: it cannot be found or fetched.
        CheckpointError: its files cannot be used.
        CompositionError: nothing installed reads or builds it.
    """
    path = find_model(
        config.model,
        default_cache_dir(environ),
        offline,
        hf_home=hugging_face_home(environ),
        progress=progress,
    )
    format_name, checkpoint = open_checkpoint(
        path, config.checkpoint, host, config_only=config_only
    )
    architecture = architecture_of(checkpoint.config, path)
    family = family_of(architecture, config.model_component, host)
    spec = family.describe(
        checkpoint.config,
        page_size=config.engine.page_size,
        kv_dtype=config.engine.kv_dtype_for("float32"),
    )
    facts = ModelFacts(
        name=str(config.model),
        architecture=architecture,
        checkpoint=format_name,
        head_dims=tuple(sorted({group.key_dim for group in spec.groups})),
        num_query_heads=spec.num_query_heads,
        head_dim=spec.head_dim,
        groups=spec.groups,
        max_position=spec.max_position,
        dtype=_weight_dtype(checkpoint.config),
        needs=spec.needs,
    )
    return FoundModel(facts=facts, checkpoint=checkpoint, family=family, spec=spec)


def architecture_of(config: Mapping[str, Any], path: Path) -> str:
    """The architecture a configuration names.

    Raises:
        CheckpointError: it names none.
    """
    names = config.get("architectures") or []
    if not names or not isinstance(names[0], str):
        raise CheckpointError(f"{path}: its configuration names no architecture ('architectures')")
    return names[0]


def open_checkpoint(
    path: Path, choice: Choice, host: PluginHost, *, config_only: bool = False
) -> tuple[str, Checkpoint]:
    """Open a checkpoint with the first reader that takes it; returns the reader's name, too.

    Args:
        path: a file or folder.
        choice: the reader that is configured, or automatic.
        host: the plugins.
        config_only: a configuration without weights will do.

    Raises:
        CheckpointError: no reader takes it, or the one that does finds it damaged.
    """
    named = not choice.is_auto and choice.use
    pool = [host.find(Slot.CHECKPOINT, choice.use)] if named else host.components(Slot.CHECKPOINT)
    refused = []
    for component in pool:
        reader = component.build(typed_options(component, {}), None)
        reason = reader.why_not(path)
        if reason is None:
            checkpoint: Checkpoint = reader.open(path)
            return component.name, checkpoint
        refused.append(f"{component.name} ({component.plugin}): {reason}")
    if config_only and (path / "config.json").is_file():
        return "", SafetensorsCheckpoint(path, config_only=True)
    raise CheckpointError(f"{path} is no checkpoint that an installed reader knows", refused)


def family_of(architecture: str, choice: Choice, host: PluginHost) -> ModelFamily:
    """What builds an architecture.

    Raises:
        CompositionError: nothing installed does.
    """
    offered = host.components(Slot.MODEL)
    if not choice.is_auto and choice.use:
        pool = [host.find(Slot.MODEL, choice.use)]
    else:
        pool = [item for item in offered if architecture in item.tags]
    if not pool:
        known = sorted({tag for item in offered for tag in item.tags})
        raise CompositionError(
            f"no model family answers to the architecture {architecture!r}",
            [f"known architectures: {', '.join(known) or 'none'}"],
        )
    options = choice.options if not choice.is_auto else {}
    family: ModelFamily = pool[0].build(typed_options(pool[0], options), ModelContext())
    return family


def _weight_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
