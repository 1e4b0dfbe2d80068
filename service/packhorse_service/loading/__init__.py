"""Blocks of shards to tokens: the loading engine, and what its worker processes run."""
