"""The running of a load test: coordinator, worker processes, simulated ranks."""
