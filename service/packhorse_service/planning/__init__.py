"""Micro-batches to steps, to ranks, and to the arrays of their rows."""
