"""Draws docs/pipeline.svg: what becomes of one batch, from the model to its gradients.

python tools/draw_pipeline.py            # writes the picture
python tools/draw_pipeline.py --check    # says whether it is up to date
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).parent.parent / "docs" / "pipeline.svg"

BOX_WIDTH, BOX_HEIGHT, GAP, MARGIN = 172, 78, 34, 18
INK, PAPER, CORE, RUNTIME, PYTHON = (
    "#1f2933",
    "#ffffff",
    "#dcebfa",
    "#fde8d0",
    "#e3f3e1",
)


class Box(NamedTuple):
    title: str
    lines: tuple[str, str]
    colour: str


# Two rows: how a plan is made, and how it is followed.
ROWS = [
    (
        "once for each kind of batch",
        [
            Box("model, batch", ("what the user has", "TrainingStep"), PYTHON),
            Box("trace", ("every op, save and byte", "Trace"), RUNTIME),
            Box("question", ("trace, config, target", "Question"), CORE),
            Box("techniques, rules", ("cuts, solver, forecast", "Decision"), CORE),
            Box("plan", ("text, JSON, reasons", "Plan"), CORE),
        ],
    ),
    (
        "every step",
        [
            Box("call", ("layers tell of their calls", "way_in"), PYTHON),
            Box("observer", ("each op as it runs", "OpUse"), RUNTIME),
            Box("tape", ("hold, drop, make again", "Tape"), CORE),
            Box("backward", ("asks for what was saved", "SavedTensor"), RUNTIME),
            Box("session", ("predicted, measured", "Session"), CORE),
        ],
    ),
]
LEGEND = [
    ("Python", PYTHON),
    ("C++ over libtorch", RUNTIME),
    ("C++ without torch", CORE),
]


def text(x: float, y: float, words: str, size: int, extra: str = "") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{INK}" {extra}>'
        f"{escape(words)}</text>"
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" '
        'stroke-width="1.5" marker-end="url(#head)"/>'
    )


def draw() -> str:
    columns = max(len(boxes) for _, boxes in ROWS)
    width = 2 * MARGIN + columns * BOX_WIDTH + (columns - 1) * GAP
    row_height = BOX_HEIGHT + 58
    height = MARGIN + len(ROWS) * row_height + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" role="img" '
        'aria-label="From a model and a batch to a plan, from a call to a gradient">',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/>'
        "</marker></defs>",
    ]
    for row, (caption, boxes) in enumerate(ROWS):
        top = MARGIN + row * row_height
        parts.append(text(MARGIN, top + 10, caption, 13, 'font-style="italic"'))
        for column, box in enumerate(boxes):
            x, y = MARGIN + column * (BOX_WIDTH + GAP), top + 20
            middle = x + BOX_WIDTH / 2
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
                f'rx="8" fill="{box.colour}" stroke="{INK}"/>'
            )
            centred = 'text-anchor="middle"'
            parts.append(
                text(middle, y + 24, box.title, 15, f'{centred} font-weight="bold"')
            )
            parts.append(text(middle, y + 45, box.lines[0], 12, centred))
            parts.append(
                text(
                    middle,
                    y + 64,
                    box.lines[1],
                    12,
                    f'{centred} font-family="monospace"',
                )
            )
            if column:
                parts.append(
                    arrow(x - GAP + 2, y + BOX_HEIGHT / 2, x - 2, y + BOX_HEIGHT / 2)
                )
    # The plan is followed by the tape; what is measured may ask for another plan.
    tape = MARGIN + 2 * (BOX_WIDTH + GAP) + BOX_WIDTH / 2
    last = MARGIN + 4 * (BOX_WIDTH + GAP) + BOX_WIDTH / 2
    bottom, below = MARGIN + 20 + BOX_HEIGHT, MARGIN + row_height + 20
    parts.append(arrow(last - 40, bottom, tape + 40, below - 2))
    parts.append(arrow(last + 30, below, last + 30, bottom + 2))
    for i, (name, colour) in enumerate(LEGEND):
        x, y = MARGIN + i * 190, height - 24
        parts.append(
            f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}" '
            f'stroke="{INK}"/>'
        )
        parts.append(text(x + 21, y + 12, name, 12))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    if not parser.parse_args().check:
        PICTURE.write_text(draw())
        return 0
    if PICTURE.exists() and PICTURE.read_text() == draw():
        print("docs/pipeline.svg is up to date")
        return 0
    print("docs/pipeline.svg is stale: run python tools/draw_pipeline.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
