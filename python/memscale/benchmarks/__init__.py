"""Benchmarks with goals: ``python -m memscale.benchmarks <name>``."""
