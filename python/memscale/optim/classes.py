"""The optimizers that users make."""

from __future__ import annotations

import torch

from memscale.optim.adam import EightBit

__all__ = ["Adam8bit", "AdamW8bit"]

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
