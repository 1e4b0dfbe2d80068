"""Packed rows: tokens, offsets, digests and context-parallel slices."""
