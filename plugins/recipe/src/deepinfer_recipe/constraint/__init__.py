"""Structured output: grammars compiled by xgrammar into masks over the vocabulary."""
