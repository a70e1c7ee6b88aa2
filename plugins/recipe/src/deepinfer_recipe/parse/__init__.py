"""Parsers of output markup: thinking and tool calls, one dialect per module."""
