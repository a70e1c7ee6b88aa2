"""Layouts and pages of attention state, without any device."""
