"""The text of an estimate says what the estimate says."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import memscale
from memscale.estimation.text import estimate_text
from memscale.report.tables import exact, layer_label, table


@pytest.fixture(scope="module")
def made() -> memscale.Estimate:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return memscale.estimate(model, torch.zeros(32, 64), device="RTX 3090")


def lines_of(text: str, title: str) -> list[str]:
    """The lines below a title, up to the next empty line."""
    part = text[text.index(title) :].split("\n\n")[0]
    return part.splitlines()[1:]


def test_breakdown_has_every_category_and_the_total(made: memscale.Estimate) -> None:
    lines = lines_of(str(made), "At the peak")
    rows = {re.split(r"\s{2,}", line.strip())[0]: line for line in lines}
    for name, size in made.breakdown.items():
        if name in ("buffers", "recompute") and size == 0:
            assert name not in rows
        else:
            assert f" {size:,} " in rows[name.replace("_", " ")]
    assert f" {made.peak_bytes:,} " in rows["total"]
    assert "100.0 %" in rows["total"]


def test_header_says_how_it_was_made(made: memscale.Estimate) -> None:
    text = " ".join(str(made).split())
    for part in (
        f"model({made.call})",
        f"loss {made.loss}",
        "optimizer AdamW",
        "target RTX 3090",
        "static: traced on fake tensors",
        "those of the simulated device",
        "(cuBLAS, cuDNN) are not in it",
    ):
        assert part in text
    assert f"in {made.peak_phase}, {made.peak_op} of " in text


def test_phases_mark_the_peak(made: memscale.Estimate) -> None:
    lines = lines_of(str(made), "Peak of each phase")
    assert [line.split()[0] for line in lines] == list(made.phases)
    for line, size in zip(lines, made.phases.values(), strict=True):
        assert f" {size:,}" in line
    (marked,) = (line for line in lines if "<- the peak" in line)
    assert marked.split()[0] == made.peak_phase


def test_cards_are_those_asked_for_and_the_target(made: memscale.Estimate) -> None:
    text = estimate_text(made, cards=("RTX 4090",))
    part = text[text.index("On a card") :]
    assert "RTX 3090  fits" in part
    assert "RTX 4090  fits" in part
    assert "RTX 3060" not in part
    fit = made.fits("RTX 3090")
    assert memscale.hardware.format_bytes(fit.needed) in part
    assert memscale.hardware.format_bytes(fit.reserve) in part


def test_what_does_not_fit_says_by_how_much() -> None:
    with torch.device("meta"):
        model = nn.Linear(32768, 32768)
    made = memscale.estimate(model, torch.zeros(1, 32768), device="RTX 3090")
    fit = made.fits("RTX 3070")
    excess = memscale.hardware.format_bytes(fit.needed - fit.capacity)
    assert re.search(rf"RTX 3070 +does not fit +{excess} too much", str(made))


def test_at_most_five_layers_are_shown() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(9)]
    made = memscale.estimate(nn.Sequential(*blocks), torch.zeros(4, 8), device="sim")
    lines = lines_of(str(made), "Most at the peak")
    assert len(lines) == 6
    shown = [layer_label(share.name) for share in made.layers[:5]]
    assert [line.split("  ")[1] for line in lines[:5]] == shown
    assert lines[5].strip().startswith(f"({len(made.layers) - 5} more)")


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [("sgd", "the peak comes before backward makes the first one")],
)
def test_says_why_gradients_are_zero(optimizer: str, reason: str) -> None:
    # The activations are large and the parameters small.
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 512))
    made = memscale.estimate(model, torch.zeros(512, 4), optimizer, device="sim")
    assert made.breakdown["gradients"] == 0
    assert f"Gradients are 0: {reason}." in str(made)


def test_no_cards_for_the_kernels_of_the_cpu() -> None:
    made = memscale.estimate(nn.Linear(4, 4), torch.zeros(1, 4), device="cpu")
    assert 'device="RTX 3090"' in str(made)
    assert "fits  " not in str(made)


def test_buffers_are_shown_where_there_are_any() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    made = memscale.estimate(model, torch.zeros(4, 8), device="sim")
    assert any("buffers" in line for line in lines_of(str(made), "At the peak"))


def test_lines_are_at_most_88_wide(made: memscale.Estimate) -> None:
    assert max(map(len, str(made).splitlines())) <= 88
    assert not any(line != line.rstrip() for line in str(made).splitlines())


def test_pieces() -> None:
    assert exact(12) == "12 bytes"
    assert exact(1536) == "1.50 KiB (1,536 bytes)"
    assert layer_label(None) == "(outside of the model)"
    assert layer_label("") == "(the model itself)"
    assert layer_label("h.0") == "h.0"
    assert table([("a", "1"), ("bcd", "22")], "<>") == "  a     1\n  bcd  22"
    assert table([], "<>") == ""
