"""An OomReport as text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from memscale._C import format_bytes
from memscale.estimation.oom_place import resident
from memscale.estimation.text import breakdown_table, layer_table
from memscale.report.tables import WIDTH, exact, fields, layer_label, place, table

if TYPE_CHECKING:
    from memscale.estimation.oom import OomReport

__all__ = ["oom_text"]

_FITS = {None: "", True: "then it fits", False: "not enough alone"}


def oom_text(report: OomReport) -> str:
    """All that the report says, for a terminal."""
    parts = [
        "MemScale: why this step ran out of memory\n" + _header(report),
        "\n".join(textwrap.fill(text, WIDTH) for text in _verdict(report)),
        "Held at that op\n" + breakdown_table(report.breakdown),
        "Most of it\n" + layer_table(report.layers),
        _options(report),
    ]
    return "\n\n".join(parts)


def _header(report: OomReport) -> str:
    seen = report.seen_phase
    if seen == "forward" and report.seen_layer is not None:
        seen += f" of {layer_label(report.seen_layer)}"
    rows = {
        "asked for": report.requested and format_bytes(report.requested),
        "failed in": f"{seen} (from the traceback)",
        "device": report.capacity and exact(report.capacity),
        "others hold": report.others
        and f"{exact(report.others)}, in tensors of neither model, batch nor optimizer",
        "for the step": report.available is not None and exact(report.available),
        "its peak": f"{exact(report.estimate.peak_bytes)} by the estimate",
    }
    return fields({name: str(text) for name, text in rows.items() if text})


def _verdict(report: OomReport) -> list[str]:
    where = place(report.phase, report.op, report.layer)
    if report.available is None:
        return [f"The size of the device is unknown. The peak is in {where}."]
    if report.excess is None:
        return _fitting(report, where)
    step = "the first step" if report.first_step else "a step"
    lines = [
        f"By the estimate {step} runs out in {where}: it needs "
        f"{exact(report.bytes)}, {exact(report.excess)} too much."
    ]
    if report.phase != report.seen_phase:
        lines.append(
            f"The traceback says {report.seen_phase}: the device holds more or less "
            "than the estimate knows of."
        )
    return lines


def _fitting(report: OomReport, where: str) -> list[str]:
    lines = [
        f"By the estimate this step fits; its most is {exact(report.bytes)}, in "
        f"{where}. Then other tensors hold memory, or the free memory is in pieces, "
        "or the step does what the sample, loss and optimizer given here do not."
    ]
    if report.allocated is not None:
        lines.append(
            f"Allocated now are {format_bytes(report.allocated)}; model, batch and "
            f"optimizer state are {format_bytes(resident(report.estimate))} of it at "
            "most."
        )
    return lines


def _options(report: OomReport) -> str:
    if not report.options:
        return "No change that MemScale knows frees anything here."
    rows = [
        (
            option.change,
            ("about " if option.approximate else "") + format_bytes(option.frees),
            _FITS[option.fits],
        )
        for option in report.options
    ]
    return "What would lower the peak, each alone\n" + table(rows, "<><")
