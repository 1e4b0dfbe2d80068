"""The ranks of a load test: what a worker process simulates, and what it tells the coordinator."""
