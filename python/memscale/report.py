"""Estimates as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from memscale import hardware
from memscale._C import format_bytes

if TYPE_CHECKING:
    from memscale.estimator import Estimate, LayerShare

__all__ = [
    "breakdown_table",
    "estimate_text",
    "exact",
    "fields",
    "layer_label",
    "layer_table",
    "place",
    "table",
]

# From 8 to 80 GiB.
CARDS = ("RTX 3070", "RTX 3060", "RTX 4080", "RTX 3090", "RTX 4090", "A100 80GB")
WIDTH = 88
_NUM_LAYERS = 5


def estimate_text(estimate: Estimate, cards: Sequence[str] = CARDS) -> str:
    """All that an estimate says, for a terminal."""
    parts = [
        "Memory of one training step\n" + _header(estimate),
        _peak(estimate),
        "At the peak\n" + breakdown_table(estimate.breakdown) + _gradients(estimate),
        "Peak of each phase\n" + _phases(estimate),
        "Most at the peak\n" + layer_table(estimate.layers),
        _cards(estimate, cards),
    ]
    if estimate.notes:
        parts.append("Notes\n" + "\n".join(map(_item, estimate.notes)))
    return "\n\n".join(parts)


# ---- parts of an estimate ----


def _header(estimate: Estimate) -> str:
    return fields(
        {
            "call": f"model({estimate.call})",
            "inputs": estimate.inputs,
            "loss": estimate.loss,
            "optimizer": estimate.optimizer,
            "target": estimate.target,
            "method": _method(estimate.method),
            "kernels": _kernels(estimate),
        }
    )


def _method(method: str) -> str:
    if method == "static":
        return "static: traced on fake tensors, nothing was computed"
    return f"{method}: one real step was run"


def _kernels(estimate: Estimate) -> str:
    kind = estimate.device.type
    if kind == "sim":
        return (
            "those of the simulated device; workspaces of a card's own kernels "
            "(cuBLAS, cuDNN) are not in it"
        )
    if kind == "cpu":
        return "the CPU's; a card's may hold less, for one in attention with dropout"
    return f"those of {kind}; workspaces that they allocate are known only in part"


def _peak(estimate: Estimate) -> str:
    text = f"Peak: {exact(estimate.peak_bytes)}"
    if estimate.peak_op is not None:
        where = place(estimate.peak_phase, estimate.peak_op, estimate.peak_layer)
        text += f"\n  in {where}"
    if estimate.host_peak_bytes:
        text += f"\n  and {exact(estimate.host_peak_bytes)} on the host"
    return text


def _gradients(estimate: Estimate) -> str:
    if estimate.breakdown.get("gradients", 0) or estimate.peak_phase is None:
        return ""
    if "backward" not in estimate.phases:
        why = "there is no backward"
    elif estimate.peak_phase == "optimizer":
        why = "none are left when the optimizer steps"
    else:
        why = "the peak comes before backward makes the first one"
    return f"\n  Gradients are 0: {why}."


def _phases(estimate: Estimate) -> str:
    rows = [
        (phase, format_bytes(size), f"{size:,}", _mark(phase == estimate.peak_phase))
        for phase, size in estimate.phases.items()
    ]
    return table(rows, "<>><")


def _mark(is_peak: bool) -> str:
    return "<- the peak" if is_peak else ""


def _cards(estimate: Estimate, cards: Sequence[str]) -> str:
    if estimate.device.type == "cpu":
        return (
            "Whether it fits a card: estimate with that card's kernels, "
            'device="RTX 3090"'
        )
    fits = {card: estimate.fits(card) for card in _with_target(estimate.target, cards)}
    reserve = next(iter(fits.values())).reserve if fits else 0
    rows = [
        (
            card,
            _verdict(fit.fits),
            f"{format_bytes(abs(fit.capacity - fit.needed))} "
            + ("to spare" if fit.fits else "too much"),
            f"of {format_bytes(fit.capacity)}",
        )
        for card, fit in fits.items()
    ]
    needed = format_bytes(estimate.peak_bytes + reserve)
    return (
        f"On a card it needs {needed}: the peak and {format_bytes(reserve)} for the\n"
        "card's context, its libraries and fragmentation (a reserve, not measured)\n"
        + table(rows, "<<>>")
    )


def _with_target(target: str, cards: Sequence[str]) -> list[str]:
    known = {device.name for device in hardware.known()}
    if target in known and target not in cards:
        return [target, *cards]
    return list(cards)


def _verdict(fits: bool) -> str:
    return "fits" if fits else "does not fit"


# ---- pieces that reports share ----


def breakdown_table(by_category: dict[str, int]) -> str:
    """Bytes by category with a total; of some only where there are any."""
    total = sum(by_category.values())
    shown = {
        name.replace("_", " "): size
        for name, size in by_category.items()
        if size or name not in ("buffers", "recompute")
    }
    rows = [
        (name, format_bytes(size), f"{size:,}", f"{100 * size / max(total, 1):.1f} %")
        for name, size in [*shown.items(), ("total", total)]
    ]
    return table(rows, "<>>>")


def layer_table(layers: Iterable[LayerShare], count: int = _NUM_LAYERS) -> str:
    """The first layers with what they hold."""
    layers = list(layers)
    rows = [
        (layer_label(share.name), format_bytes(share.bytes), _mostly(share))
        for share in layers[:count]
    ]
    rest = layers[count:]
    if rest:
        size = format_bytes(sum(share.bytes for share in rest))
        rows.append((f"({len(rest)} more)", size, ""))
    return table(rows, "<><")


def _mostly(share: LayerShare) -> str:
    """The categories that make up the layer's bytes, largest first."""
    parts = sorted(share.by_category.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)}"
        for name, size in parts[:2]
        if size
    )


def layer_label(name: str | None) -> str:
    if name is None:
        return "(outside of the model)"
    return name or "(the model itself)"


def place(phase: str | None, op: str | None, layer: str | None) -> str:
    """ "backward, aten::mm of h.3"."""
    return f"{phase}, {op} of {layer_label(layer)}"


def exact(size: int) -> str:
    """ "1.50 KiB (1,536 bytes)"."""
    text = format_bytes(size)
    return text if text.endswith("bytes") else f"{text} ({size:,} bytes)"


def fields(texts: dict[str, str]) -> str:
    """Names and texts in two columns, long texts wrapped."""
    width = max(map(len, texts))
    return "\n".join(
        textwrap.fill(
            text,
            WIDTH,
            initial_indent=f"  {name:<{width}}  ",
            subsequent_indent=" " * (width + 4),
            break_long_words=False,
        )
        for name, text in texts.items()
    )


def _item(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Aligned columns; ``align`` has a "<" or ">" for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            f"{cell:{side}{width}}"
            for cell, side, width in zip(row, align, widths, strict=True)
        )
        for row in rows
    )
    return "\n".join(f"  {line}".rstrip() for line in lines)
