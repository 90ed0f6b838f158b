"""Adam and AdamW with one byte for each moment instead of four.

::

    optimizer = memscale.optim.AdamW8bit(model.parameters(), lr=1e-3)

They are torch's own Adam and AdamW with another state: schedulers, clipping,
GradScaler, closures, hooks and groups work as there, and ``state_dict`` is torch's.
``to_8bit`` makes one of a live torch.optim.Adam or AdamW, in place. See
docs/optimizer.md.
"""

from __future__ import annotations

import torch

from memscale._optim_adam import EightBit
from memscale._optim_convert import from_8bit, is_8bit, to_8bit, why_not_8bit

__all__ = [
    "Adam8bit",
    "AdamW8bit",
    "from_8bit",
    "is_8bit",
    "to_8bit",
    "why_not_8bit",
]

_DOC = """

    Args: torch's, with torch's defaults, and for each group

        bits: 8, or 32 for float32 moments, stepped by a fused kernel as well.
        min_8bit_size: tensors of fewer elements keep float32 moments.
        stochastic_rounding: bfloat16 parameters are rounded up or down at random,
            in proportion to the distance, instead of to nearest.

    ``foreach`` and ``fused`` are accepted: the step is always fused; ``fused=True``
    lets GradScaler leave the unscaling to it. ``amsgrad``, ``capturable`` and
    ``differentiable`` need ``bits=32``. Parameters of other types than float32,
    bfloat16 and float16 are stepped by torch, with torch's state.
    """


class Adam8bit(EightBit):
    __doc__ = "torch.optim.Adam with 8-bit moments." + _DOC


class AdamW8bit(EightBit, torch.optim.AdamW):
    __doc__ = "torch.optim.AdamW with 8-bit moments." + _DOC
