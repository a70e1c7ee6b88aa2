"""DeepSeek models for DeepInfer.

Nothing heavy is imported here; builders import their modules when an engine is built.
"""

from __future__ import annotations

DEEPINFER_API = 1
