"""What a load test came to, for programs and for people."""
