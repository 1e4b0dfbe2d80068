"""Packed rows: their arrays, geometry, digest and context-parallel slices."""
