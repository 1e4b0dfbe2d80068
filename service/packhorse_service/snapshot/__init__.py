"""The resumable state of a stream, as bytes, and the fingerprint of what it belongs to."""
