"""What makes a model: the type that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# A model in its training mode, and the keyword arguments that it is called with.
Made = tuple[nn.Module, dict[str, Any]]
Maker = Callable[[], Made]
