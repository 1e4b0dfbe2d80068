"""The one deterministic order of samples, and how it resumes."""
