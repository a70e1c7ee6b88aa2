"""Wire formats: what clients send and expect, one module per protocol."""
