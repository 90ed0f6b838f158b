"""Models in plain torch, of kinds that transformers has few of.

Each is a class whose forward takes a batch as keyword arguments and returns its loss,
and a function that makes the model and a batch for it. They are written as such models
are written, with dropout where that is natural, several equal layers, and activations
above 64 KiB, the least that a plan looks at.
"""

from __future__ import annotations

from zoo.torch_models.table import MODELS, Entry

__all__ = ["MODELS", "Entry"]
