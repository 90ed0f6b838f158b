"""Estimates as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memscale.estimator import Estimate

__all__ = ["estimate_text"]


def estimate_text(estimate: Estimate) -> str:
    return str(estimate.peak_bytes)
