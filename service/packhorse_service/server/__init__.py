"""The server: its socket, threads, clock, keys and logs."""
