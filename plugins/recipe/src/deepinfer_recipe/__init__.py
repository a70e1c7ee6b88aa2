"""Protocols, prompts, output markup and structured output for DeepInfer."""

from __future__ import annotations

DEEPINFER_API = 1
