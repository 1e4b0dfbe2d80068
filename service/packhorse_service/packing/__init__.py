"""Samples to micro-batches, by packing mode and packing algorithm."""
