"""The command ``memscale``."""

from memscale.cli.commands import main

__all__ = ["main"]
