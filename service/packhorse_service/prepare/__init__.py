"""``packhorse prepare``: published data sets to shards."""
