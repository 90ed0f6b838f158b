"""`make demo`: train a small GPT-2 on a simulated card and see where its bytes go.

Predicted before it runs, and measured. Then the same training on a card half that
size: the out-of-memory error that a user meets before MemScale, explained.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

import memscale
from memscale.config import format_bytes

TEXT = (Path(__file__).parent / "data" / "alice.txt").read_bytes()
BATCH, LENGTH, STEPS = 8, 128, 12


def make_model() -> GPT2LMHeadModel:
    """A byte-level GPT-2 with 4.8 M random weights."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=256,
            n_layer=6,
            n_head=8,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def make_batch(step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - LENGTH, (BATCH,), generator=generator)
    rows = [list(TEXT[int(s) : int(s) + LENGTH]) for s in starts]
    return torch.tensor(rows, device=device)


def train(device: torch.device, steps: int) -> tuple[list[float], dict[str, int]]:
    """A plain training loop; returns the losses and the last step's peaks."""
    model = make_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    peaks: dict[str, int] = {}
    for step in range(steps):
        batch = make_batch(step, device)
        with memscale.memory.track(device) as forward:
            loss = model(input_ids=batch, labels=batch).loss
        with memscale.memory.track(device) as backward:
            loss.backward()
        with memscale.memory.track(device) as update:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        peaks = {
            "forward": forward.peak,
            "backward": backward.peak,
            "optimizer": update.peak,
        }
    return losses, peaks


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console = Console()
    device = memscale.simdev.enable(memory="512MiB")
    console.print(
        f"\nTraining a byte-level GPT-2 (6 layers, width 256, batch {BATCH} x {LENGTH})"
        f" on a simulated card of 512 MiB, {STEPS} steps ..."
    )
    batch = make_batch(0, torch.device("cpu"))
    sample = {"input_ids": batch, "labels": batch}
    predicted = memscale.estimate(make_model(), sample, "adamw", device=device)
    losses, peaks = train(device, STEPS)
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\n")

    table = Table(title="Peak bytes on the simulated card")
    table.add_column("phase")
    table.add_column("predicted", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("error", justify="right")
    for phase, peak in peaks.items():
        guess = predicted.phases[phase]
        error = f"{100 * (guess - peak) / peak:+.2f} %"
        table.add_row(phase, f"{guess:,}", f"{peak:,}", error)
    console.print(table)

    half = max(peaks.values()) // 2
    device = memscale.simdev.enable(memory=half)
    console.print(f"\nThe same training on a card of {format_bytes(half)}:")
    try:
        train(device, 1)
    except torch.OutOfMemoryError as error:
        console.print(f"[bold red]torch.OutOfMemoryError[/]: {error}\n")
        report = memscale.explain_oom(error, make_model(), sample, device=device)
        print(report)
    else:
        raise SystemExit("the half-size card should have run out of memory")
    console.print(
        "\nMeasured on the simulated device: tensors as on a card, workspaces and"
        " speed of this machine's CPU."
    )


if __name__ == "__main__":
    main()
