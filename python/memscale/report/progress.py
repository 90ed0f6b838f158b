"""A sign of life for what takes more than two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

__all__ = ["progress"]

_PATIENCE = 2.0  # seconds


@contextmanager
def progress(what: str) -> Iterator[None]:
    """On a terminal, a spinner saying ``what`` if it takes long; else nothing."""
    if not sys.stderr.isatty():
        yield
        return
    status = Console(stderr=True).status(f"memscale: {what} …")
    timer = threading.Timer(_PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be starting just now
        status.stop()
