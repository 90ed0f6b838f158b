"""Estimates as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from memscale import hardware
from memscale._C import format_bytes
from memscale.report.tables import exact, fields, item, layer_label, place, table

if TYPE_CHECKING:
    from memscale._C import Plan
    from memscale.estimation.estimate import Estimate, LayerShare

__all__ = [
    "breakdown_table",
    "estimate_text",
    "layer_table",
]

# From 8 to 80 GiB.
CARDS = ("RTX 3070", "RTX 3060", "RTX 4080", "RTX 3090", "RTX 4090", "A100 80GB")
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
        parts.append("Notes\n" + "\n".join(map(item, estimate.notes)))
    return "\n\n".join(parts)


# ---- parts of an estimate ----


def _header(estimate: Estimate) -> str:
    plan = {} if estimate.plan is None else {"plan": _plan(estimate.plan)}
    return fields(
        {
            "call": f"model({estimate.call})",
            "inputs": estimate.inputs,
            "loss": estimate.loss,
            "optimizer": estimate.optimizer,
            "target": estimate.target,
            **plan,
            "method": _method(estimate.method),
            "kernels": _kernels(estimate),
        }
    )


def _plan(plan: Plan) -> str:
    asked = f"mode {plan.mode}"
    if plan.budget is not None:
        asked = f"budget {format_bytes(plan.budget)}"
    recomputing = sum(layer.recomputes for layer in plan.layers)
    others = ", ".join(f"{each.technique} {each.choice}" for each in plan.choices)
    return (
        f"{asked}: {recomputing} of {len(plan.layers)} layers recompute, "
        f"{plan.slowdown:.0%} slower" + (f"; {others}" if others else "")
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
    if estimate.plan is not None:
        text += f" under the plan\n  instead of {exact(estimate.plain_peak_bytes)}"
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


# ---- parts that it shares with reports on memory that ran out ----


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
