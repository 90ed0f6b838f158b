"""Requested bytes beside predicted ones, on the card of these tests."""

from __future__ import annotations

# torch's default for each handle of cuBLAS below compute capability 9. The main
# thread has one and autograd's another; predictions do not count them yet.
CUBLAS_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
UNPREDICTED = 2 * CUBLAS_WORKSPACE
TOLERANCE = 0.001


def is_as_predicted(measured: int, predicted: int) -> bool:
    slack = int(predicted * TOLERANCE)
    return predicted - slack <= measured <= predicted + UNPREDICTED + slack
