"""``use_cache`` of Hugging Face models: keys and values held for generation.

In training nobody reads them, yet they would be held through the whole step, against
what recomputation saves. While a wrapped model is called for training the switch is
off; evaluation and ``generate`` find it as it was.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["UseCache"]


class UseCache:
    """The switches of one model. Calls may nest and come from several threads."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # it may own this
        self._lock = threading.Lock()
        self._num_calls = 0
        self._turned: list[Any] = []

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            self._num_calls += 1
            if self._num_calls == 1:
                self._turned = list(self._configs())
                for config in self._turned:
                    config.use_cache = False
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        with self._lock:
            self._num_calls -= 1
            if self._num_calls == 0:
                for config in self._turned:
                    config.use_cache = True
                self._turned = []

    def _configs(self) -> Iterator[Any]:
        """Those that are on; a configuration that modules share comes once."""
        seen: set[int] = set()
        model = self._model()
        for module in () if model is None else model.modules():
            config = module.__dict__.get("config")
            if id(config) in seen or getattr(config, "use_cache", None) is not True:
                continue
            seen.add(id(config))
            yield config
