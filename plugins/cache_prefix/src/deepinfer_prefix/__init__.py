"""Prefix cache and the tiers of pages behind it for DeepInfer."""

from __future__ import annotations

DEEPINFER_API = 1
