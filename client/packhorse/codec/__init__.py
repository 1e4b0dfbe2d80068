"""Micro-batches to the views on the wire, and back."""
