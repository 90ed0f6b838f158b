"""Adam and AdamW with one byte for each moment instead of four.

::

    optimizer = memscale.optim.AdamW8bit(model.parameters(), lr=1e-3)

They are torch's own Adam and AdamW with another state: schedulers, clipping,
GradScaler, closures, hooks and groups work as there, and ``state_dict`` is torch's.
``to_8bit`` makes one of a live torch.optim.Adam or AdamW, in place. See
docs/optimizer.md.
"""

from __future__ import annotations

from memscale.optim.classes import Adam8bit, AdamW8bit
from memscale.optim.convert import from_8bit, is_8bit, to_8bit, why_not_8bit

__all__ = [
    "Adam8bit",
    "AdamW8bit",
    "from_8bit",
    "is_8bit",
    "to_8bit",
    "why_not_8bit",
]
