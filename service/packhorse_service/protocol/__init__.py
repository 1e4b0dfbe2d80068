"""The server half of the protocol: no socket, clock or thread."""
