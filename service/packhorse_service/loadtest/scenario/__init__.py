"""What a load test is: its scenario, thresholds and data."""
