"""Where models come from: short names, local caches, the hub, and wheels.

``names`` says what a short name stands for, ``locate`` finds a model on this machine or fetches
it, ``remote`` knows the two places to fetch from, ``pull`` moves bytes safely.
"""

from __future__ import annotations

from deepinfer_core.hub.locate import (
    CachedModel,
    default_cache_dir,
    find_cached,
    find_model,
    hugging_face_home,
    list_cached,
)
from deepinfer_core.hub.names import MODELS, ModelSource, WheelSource, source_of
from deepinfer_core.hub.progress import Progress, Silent, TerminalProgress

__all__ = [
    "CachedModel",
    "MODELS",
    "ModelSource",
    "Progress",
    "Silent",
    "TerminalProgress",
    "WheelSource",
    "default_cache_dir",
    "find_cached",
    "find_model",
    "hugging_face_home",
    "list_cached",
    "source_of",
]
