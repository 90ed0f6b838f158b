"""All of them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from zoo.torch_models import images

Made = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """``has_random_depth``: it leaves out layers at random."""

    make: Callable[[], Made]
    has_random_depth: bool = False


MODELS: dict[str, Entry] = {
    **{name: Entry(make) for name, make in images.MAKERS.items()},
}
