"""Numbers, curves and drawings for people."""
