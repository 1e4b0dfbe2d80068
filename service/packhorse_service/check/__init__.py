"""``packhorse check``: the handshake's rules and the memory bound, offline."""
