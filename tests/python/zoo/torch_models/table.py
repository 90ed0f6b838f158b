"""All of them by name: "torch:resnet". transformers has a "resnet" of its own."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.torch_models import (
    flows,
    generative,
    images,
    recurrences,
    sounds,
    structures,
    tables,
    tuned,
    volumes,
)
from zoo.torch_models.made import Maker


@dataclass(frozen=True)
class Entry:
    """``has_random_depth``: it leaves out layers at random."""

    make: Maker
    has_random_depth: bool = False


_FILES = (
    images,
    volumes,
    generative,
    flows,
    sounds,
    recurrences,
    structures,
    tables,
    tuned,
)

MODELS: dict[str, Entry] = {
    f"torch:{name}": Entry(make)
    for file in _FILES
    for name, make in file.MAKERS.items()
} | {
    f"torch:{name}": Entry(make, has_random_depth=True)
    for name, make in tuned.RANDOM_DEPTH.items()
}
