"""Tiny models with the published names, and a slow one to compare with."""
