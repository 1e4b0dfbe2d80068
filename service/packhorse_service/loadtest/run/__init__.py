"""The run of a load test: the coordinator, the processes that it starts, and what was measured."""
