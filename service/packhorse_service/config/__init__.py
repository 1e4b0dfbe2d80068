"""The configuration file and its checks."""
