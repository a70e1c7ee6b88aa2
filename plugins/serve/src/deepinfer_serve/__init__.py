"""HTTP server for DeepInfer."""

from __future__ import annotations

DEEPINFER_API = 1
