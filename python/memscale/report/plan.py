"""Plans for a terminal, the log and notebooks."""

from __future__ import annotations

import html
import io
import itertools
import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from memscale import hardware
from memscale._C import LayerPlan, Plan, format_bytes
from memscale.config import Config
from memscale.model.layers import find_layers
from memscale.report.tables import layer_label

__all__ = ["frontier_html", "frontier_text", "plan_html", "plan_text", "wrapped_text"]

_WIDTH = 100
Rows = list[tuple[str, ...]]


# ---- one plan ----


def plan_text(plan: Plan) -> str:
    """The table of layers, techniques and bytes, and what is predicted."""
    title = f"{plan.model} with {plan.call}"
    return "\n".join([_rendered(_plan_rows(plan), title), *_summary(plan)])


def plan_html(plan: Plan) -> str:
    """The same for notebooks."""
    text = "<br>".join(html.escape(line) for line in _summary(plan))
    return f"{_html_table(_plan_rows(plan))}<p>{text}</p>"


def _plan_rows(plan: Plan) -> Rows:
    """A head, neighbours that do the same as one row, and a total."""
    total = sum(layer.plain_bytes for layer in plan.layers)
    held = sum(layer.held_bytes for layer in plan.layers)
    rows: Rows = [("layer", "technique", "activations", "held", "change")]
    for names, layer in _groups(plan.layers):
        each = " each" if len(names) > 1 else ""
        rows.append(
            (
                _range(names),
                layer.technique,
                format_bytes(layer.plain_bytes) + each,
                format_bytes(layer.held_bytes) + each,
                _change(layer.plain_bytes, layer.held_bytes),
            )
        )
    rows.append(
        ("total", "", format_bytes(total), format_bytes(held), _change(total, held))
    )
    return rows


def _summary(plan: Plan) -> list[str]:
    plain, peak = plan.plain_peak_bytes, plan.peak_bytes
    lines = [
        f"predicted on {plan.device} with {plan.optimizer}: peak {format_bytes(peak)} "
        f"instead of {format_bytes(plain)} ({_change(plain, peak)}), "
        f"{plan.slowdown:.0%} slower"
    ]
    lines += [f"{verdict.rule}: {verdict.text}" for verdict in plan.verdicts]
    return lines


def _change(plain: int, held: int) -> str:
    return f"{100 * (held - plain) / plain:+.0f} %" if plain else ""


def _groups(layers: Iterable[LayerPlan]) -> Iterable[tuple[list[str], LayerPlan]]:
    """Neighbours that do the same; layers that hold nothing are left out."""
    shown = [layer for layer in layers if layer.plain_bytes or layer.held_bytes]

    def key(layer: LayerPlan) -> tuple[str, str, int, int]:
        pattern = re.sub(r"\d+", "#", layer.layer)
        return pattern, layer.technique, layer.plain_bytes, layer.held_bytes

    for _, group in itertools.groupby(shown, key):
        members = list(group)
        yield [member.layer for member in members], members[0]


def _range(names: list[str]) -> str:
    """ "transformer.h.0 … 11"."""
    if len(names) == 1:
        return layer_label(names[0])
    last = names[-1].split(".")
    differing = [
        part
        for part, other in zip(last, names[0].split("."), strict=False)
        if part != other
    ]
    return f"{names[0]} … {'.'.join(differing) or names[-1]}"


# ---- several ----


def frontier_text(plans: Sequence[Plan]) -> str:
    if not plans:
        return "no plans"
    title = f"{plans[0].model} with {plans[0].call} for {plans[0].device}"
    return _rendered(_frontier_rows(plans), title, has_total=False)


def frontier_html(plans: Sequence[Plan]) -> str:
    return _html_table(_frontier_rows(plans))


def _frontier_rows(plans: Sequence[Plan]) -> Rows:
    heads = ("predicted peak", "change", "slower by", "layers that recompute")
    # They may be lossy: where one plan has any, every row says which it has.
    has_others = any(plan.choices for plan in plans)
    rows: Rows = [(*heads, "for the whole step") if has_others else heads]
    for plan in plans:
        recomputing = sum(layer.recomputes for layer in plan.layers)
        others = ", ".join(f"{c.technique} {c.choice}" for c in plan.choices)
        rows.append(
            (
                format_bytes(plan.peak_bytes),
                _change(plan.plain_peak_bytes, plan.peak_bytes),
                f"{plan.slowdown:.1%}",
                f"{recomputing} of {len(plan.layers)}",
                *([others or "nothing"] if has_others else []),
            )
        )
    return rows


# ---- what was wrapped ----


def wrapped_text(model: nn.Module, config: Config, compiled: bool) -> str:
    """What is wrapped, on which hardware and how, in a line or two."""
    parameters = sum(p.numel() for p in model.parameters())
    layers = len(find_layers(model).modules)
    budget = "" if config.budget is None else f", budget {format_bytes(config.budget)}"
    text = (
        f"memscale: {type(model).__name__} ({parameters:,} parameters, {layers} layers)"
        f" on {_hardware(model)}; mode {config.mode.value}{budget}"
    )
    if compiled:
        text += (
            "\nmemscale: it is compiled: its graphs hold what the compiler chose, "
            "and nothing is recomputed"
        )
    return text


def _hardware(model: nn.Module) -> str:
    found = hardware.detect()
    device = next((p.device for p in model.parameters()), None)
    host = f"host with {format_bytes(found.host.total_memory)}"
    if device is None or device.type in ("cpu", "meta"):
        return f"the {host}, {found.host.num_cores} cores"
    spec = found.devices[device.index or 0]
    memory = "unknown memory" if spec.memory is None else format_bytes(spec.memory)
    return f"{device} ({spec.name}, {memory}), {host}"


# ---- tables ----


def _rendered(rows: Rows, title: str, has_total: bool = True) -> str:
    table = Table(
        title=title,
        title_style="",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=has_total,
    )
    footer = rows[-1] if has_total else ("",) * len(rows[0])
    left = {"layer", "technique"}
    for head, foot in zip(rows[0], footer, strict=True):
        table.add_column(head, foot, justify="left" if head in left else "right")
    for row in rows[1:-1] if has_total else rows[1:]:
        table.add_row(*row)
    out = io.StringIO()
    # Names are names, whatever brackets or colons they have.
    console = Console(
        file=out, width=_WIDTH, color_system=None, markup=False, emoji=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())


def _html_table(rows: Rows) -> str:
    def line(row: tuple[str, ...], tag: str) -> str:
        cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        return f"<tr>{cells}</tr>"

    body = "".join(line(row, "td") for row in rows[1:])
    return f"<table><thead>{line(rows[0], 'th')}</thead><tbody>{body}</tbody></table>"


def _show() -> None:
    """Plans print as their tables."""
    shown: type = Plan
    shown.__str__ = plan_text  # type: ignore[assignment]
    shown._repr_html_ = plan_html  # type: ignore[attr-defined]


_show()
