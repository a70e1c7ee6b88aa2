"""Checkpoints of DeepSeek models: their tensors, packed formats, and how weights are held."""
