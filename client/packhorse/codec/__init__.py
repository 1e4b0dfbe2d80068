"""Rows to the views on the wire, and views to micro-batches."""
