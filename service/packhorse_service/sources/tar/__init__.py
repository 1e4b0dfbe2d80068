"""Reading tar shards: members forward from any offset, grouped into samples."""
