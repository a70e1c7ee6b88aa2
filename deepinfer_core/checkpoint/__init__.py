"""Checkpoints: safetensors directories and GGUF files behind one interface.

The formats are in ``safetensors`` and ``gguf``, the check of weights against a model in
``coverage``. This module stays light: it imports neither torch nor a file format.
"""
