"""Renderers: conversations into prompts, one way per module."""
