"""The packing server. Read ``pipeline`` first: it composes the stages, top to bottom."""
