"""Kernels in Triton. Narrow numbers are widened before any arithmetic but products of tiles."""
