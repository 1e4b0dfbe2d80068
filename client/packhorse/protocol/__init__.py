"""The client half of the protocol: no socket, clock or thread."""
