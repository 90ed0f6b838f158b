"""Is training the same? Plain and wrapped steps, compared to the bit."""

from memscale.verify.correctness import (
    Difference,
    FirstBatchCheck,
    VerifyError,
    VerifyReport,
    verify_at_wrap,
    verify_correctness,
)

__all__ = [
    "Difference",
    "FirstBatchCheck",
    "VerifyError",
    "VerifyReport",
    "verify_at_wrap",
    "verify_correctness",
]
