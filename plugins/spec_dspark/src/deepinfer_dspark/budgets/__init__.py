"""Policies for how many drafts a step verifies, and what steps cost."""
