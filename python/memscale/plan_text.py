"""Plans for a terminal and for the log."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import memscale
from memscale._C import format_bytes
from memscale.config import Config
from memscale.layers import find_layers
from memscale.planning import LayerPlan, Plan
from memscale.report import layer_label

__all__ = ["plan_text", "wrapped_text"]

_WIDTH = 88
_TECHNIQUE = {
    "keep": "keep",
    "cheap": "recompute (cheap)",
    "block": "recompute (block)",
}


def plan_text(plan: Plan) -> str:
    """The table of layers, techniques and bytes, and the peaks."""
    table = Table(
        title=f"{plan.model} with {plan.call}",
        title_style="",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=True,
    )
    total = sum(layer.plain_bytes for layer in plan.layers)
    held = sum(layer.held_bytes for layer in plan.layers)
    table.add_column("layer", "total")
    table.add_column("technique")
    table.add_column("activations", format_bytes(total), justify="right")
    table.add_column("held", format_bytes(held), justify="right")
    table.add_column("saved", _share(total, held), justify="right")
    for names, layer in _groups(plan.layers):
        each = " each" if len(names) > 1 else ""
        table.add_row(
            _range(names),
            _TECHNIQUE[layer.policy],
            format_bytes(layer.plain_bytes) + each,
            format_bytes(layer.held_bytes) + each,
            _share(layer.plain_bytes, layer.held_bytes),
        )
    lines = [_render(table), _peaks(plan)]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _peaks(plan: Plan) -> str:
    plain, wrapped = plan.plain_peak_bytes, plan.peak_bytes
    return (
        f"predicted peak on {plan.device} with {plan.optimizer}: "
        f"{format_bytes(plain)} plain, {format_bytes(wrapped)} wrapped "
        f"({_share(plain, wrapped)})"
    )


def _share(plain: int, held: int) -> str:
    return f"{100 * (held - plain) / plain:+.0f} %" if plain else ""


def _groups(
    layers: Iterable[LayerPlan],
) -> Iterable[tuple[list[str], LayerPlan]]:
    """Neighbours that do the same; layers that hold nothing are left out."""
    shown = [layer for layer in layers if layer.plain_bytes or layer.held_bytes]

    def key(layer: LayerPlan) -> tuple[str, str, int, int]:
        pattern = re.sub(r"\d+", "#", layer.name)
        return pattern, layer.policy, layer.plain_bytes, layer.held_bytes

    for _, group in itertools.groupby(shown, key):
        members = list(group)
        yield [member.name for member in members], members[0]


def _range(names: list[str]) -> str:
    if len(names) == 1:
        return layer_label(names[0])
    return f"{names[0]} … {names[-1]}"


def _render(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())


def wrapped_text(model: nn.Module, config: Config, compiled: bool) -> str:
    """What is wrapped, where and how, in a line or two."""
    parameters = sum(p.numel() for p in model.parameters())
    layers = find_layers(model)
    head = (
        f"memscale {memscale.__version__}: {type(model).__name__}, "
        f"{parameters:,} parameters, {len(layers.modules)} layers, "
        f"mode {config.mode.value}"
    )
    if compiled:
        return head + (
            "\nit is compiled: its graphs hold what the compiler chose, and nothing "
            "is recomputed (wrap before torch.compile does not change that)"
        )
    return head
