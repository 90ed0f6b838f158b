"""Pieces that texts for a terminal share."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from memscale._C import format_bytes

__all__ = ["WIDTH", "exact", "fields", "item", "layer_label", "place", "table"]

WIDTH = 88


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


def item(text: str) -> str:
    """One of a list, wrapped."""
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
