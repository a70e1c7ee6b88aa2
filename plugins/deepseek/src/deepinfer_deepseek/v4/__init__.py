"""DeepSeek-V4: every compressed layer has entries of its own, and all layers compute all rows."""
