"""Speculative decoding: drafters and budgets of verification for DeepInfer."""

from __future__ import annotations

DEEPINFER_API = 1
