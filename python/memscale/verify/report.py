"""What a verification found, and how it is said: see memscale.verify."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memscale._C import Error

__all__ = ["BLOCK_BY_BLOCK", "FULL_STEP", "Difference", "VerifyError", "VerifyReport"]

FULL_STEP = "full step"
BLOCK_BY_BLOCK = "block by block"

# Names in a text; a report's fields have them all.
_SHOWN = 8


class VerifyError(Error):
    """The wrapped model does not compute what the plain one does."""

    def __init__(self, report: VerifyReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Difference:
    """A tensor that the two steps do not agree on.

    ``max_abs``: the largest distance of two of its numbers; inf where a shape, a
    type or a NaN differs, 0.0 where only the sign of a zero does.
    """

    name: str
    max_abs: float

    def __str__(self) -> str:
        return f"{self.name} (by up to {self.max_abs:.3g})"


@dataclass
class VerifyReport:
    """A plain step and a wrapped one, from the same state, compared."""

    how: str = FULL_STEP  # "batch 2 of 16", "sequence 128 of 512", "block by block"
    why: str = ""  # it was not the full step
    call: str = ""
    loss: float | None = None  # of the plain step
    loss_source: str = ""
    loss_equal: bool | None = None  # None: there is no loss, or no whole step was run
    tolerance: float = 0.0  # of the largest number of each tensor; 0: every bit
    num_compared: int = 0
    differing: list[Difference] = field(default_factory=list)
    # Parameters with a gradient in the plain step and none in the wrapped one.
    missing: list[str] = field(default_factory=list)
    error: str = ""  # that only the wrapped step raised
    first_differing_layer: str | None = None  # "" is the model itself
    # Trainable parameters that will not learn, and why: not the wrapping's fault.
    untrained: dict[str, str] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)
    saves_dropped: int | None = None  # in the wrapped step; None: unknown
    bytes_dropped: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not (self.differing or self.missing or self.error)

    def raise_if_failed(self) -> None:
        """Raise VerifyError, with this report as its text, unless it passed."""
        if not self.passed:
            raise VerifyError(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and texts."""
        made = {name: getattr(self, name) for name in self.__dataclass_fields__}
        differing = [dict(vars(difference)) for difference in self.differing]
        return {"passed": self.passed, **made, "differing": differing}

    def __str__(self) -> str:
        return "\n".join([_verdict(self), *_facts(self), *_findings(self)])


def _verdict(report: VerifyReport) -> str:
    if not report.passed:
        return "MemScale: the wrapped step is NOT the same as the plain one"
    if report.tolerance:
        return f"MemScale: the wrapped step is the same within {report.tolerance:g}"
    return "MemScale: the wrapped step is the same as the plain one, bit for bit"


def _facts(report: VerifyReport) -> list[str]:
    because = f", because {report.why}" if report.why else ""
    lines = [f"  how       {report.how}{because}", f"  call      model({report.call})"]
    if report.loss is not None:
        equal = "equal" if report.loss_equal else "NOT equal"
        lines.append(f"  loss      {report.loss:g}, {equal} ({report.loss_source})")
    lines.append(f"  compared  {report.num_compared} tensors")
    if report.saves_dropped is not None:
        lines.append(
            f"  dropped   {report.saves_dropped} saved tensors, "
            f"{report.bytes_dropped} bytes"
        )
    return lines


def _findings(report: VerifyReport) -> list[str]:
    lines = []
    if report.first_differing_layer is not None:
        layer = report.first_differing_layer or "(the model itself)"
        lines.append(f"  first differing layer: {layer}")
    if report.error:
        lines.append(f"  the wrapped step raised {report.error}")
    lines += _listed("differing", [str(entry) for entry in report.differing])
    lines += _listed("without their gradient", report.missing)
    lines += _listed(
        "not trained by this step",
        [f"{name}: {why}" for name, why in report.untrained.items()],
    )
    lines += _listed("not checked", report.unchecked)
    return lines + [f"  note: {note}" for note in report.notes]


def _listed(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    lines = [f"  {title} ({len(names)})", *(f"    {name}" for name in names[:_SHOWN])]
    if len(names) > _SHOWN:
        lines.append(f"    and {len(names) - _SHOWN} more")
    return lines
