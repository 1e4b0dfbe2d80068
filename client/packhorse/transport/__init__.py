"""The client's socket, its keys and its thread."""
