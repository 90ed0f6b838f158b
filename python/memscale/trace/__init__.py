"""A training step becomes a trace: without running it, or as it runs."""
