"""`make demo`: a GPT-2 that does not fit a card, and the one line that makes it fit.

On a simulated card of half the size that training needs, the plain loop runs out of
memory. The same loop with ``memscale.wrap(model)`` trains there, and every number is
the same, bit for bit, as on a card with room for all.
"""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass, field
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


@dataclass
class Run:
    """What a training came to: losses, weights, and the last step's peaks."""

    losses: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # CPU seconds, by step

    @property
    def seconds(self) -> float:
        return statistics.median(self.times[1:])


def train(device: torch.device, wrap: bool) -> Run:
    """A plain training loop. One line of it is MemScale's."""
    model = make_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if wrap:
        memscale.wrap(model)
    torch.manual_seed(1)  # dropout
    run = Run()
    for step in range(STEPS):
        start = time.process_time()
        batch = make_batch(step, device)
        with memscale.memory.track(device) as forward:
            loss = model(input_ids=batch, labels=batch).loss
        with memscale.memory.track(device) as backward:
            loss.backward()
        with memscale.memory.track(device) as update:
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
        run.times.append(time.process_time() - start)
        trackers = {"forward": forward, "backward": backward, "optimizer": update}
        run.peaks = {phase: tracker.peak for phase, tracker in trackers.items()}
    run.weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return run


def show(console: Console, plain: Run, wrapped: Run) -> None:
    table = Table(title="One training step, bytes on the card")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("wrapped", justify="right")
    table.add_column("change", justify="right")
    rows = [*plain.peaks.items(), ("peak", max(plain.peaks.values()))]
    for phase, before in rows:
        after = wrapped.peaks.get(phase, max(wrapped.peaks.values()))
        change = f"{100 * (after - before) / before:+.0f} %"
        table.add_row(phase, f"{before:,}", f"{after:,}", change)
    slower = f"{100 * (wrapped.seconds / plain.seconds - 1):+.0f} %"
    table.add_row(
        "CPU seconds", f"{plain.seconds:.2f}", f"{wrapped.seconds:.2f}", slower
    )
    console.print(table)


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console = Console()
    device = memscale.simdev.enable(memory="512MiB")
    console.print(
        f"\n[bold]1. A card with room for all[/]: 512 MiB, simulated. A byte-level "
        f"GPT-2 (6 layers, width 256, batch {BATCH} x {LENGTH}), {STEPS} steps, "
        "dropout on."
    )
    batch = make_batch(0, torch.device("cpu"))
    sample = {"input_ids": batch, "labels": batch}
    predicted = memscale.estimate(make_model(), sample, "adamw", device=device)
    plain = train(device, wrap=False)
    peak = max(plain.peaks.values())
    console.print(
        f"loss {plain.losses[0]:.3f} -> {plain.losses[-1]:.3f}; peak {peak:,} bytes, "
        f"predicted {predicted.peak_bytes:,} before it ran\n"
    )

    half = peak // 2
    device = memscale.simdev.enable(memory=half)
    console.print(f"[bold]2. The same on a card of {format_bytes(half)}[/]")
    try:
        train(device, wrap=False)
    except torch.OutOfMemoryError as error:
        console.print(f"[bold red]torch.OutOfMemoryError[/]: {error}\n")
        error.__traceback__ = None  # whose frames hold the tensors
    else:
        raise SystemExit("the half-size card should have run out of memory")

    console.print("[bold]3. The same card, with memscale.wrap(model)[/]")
    wrapped = train(memscale.simdev.enable(memory=half), wrap=True)
    same = plain.losses == wrapped.losses and all(
        torch.equal(a, b) for a, b in zip(plain.weights, wrapped.weights, strict=True)
    )
    console.print(f"\nloss {wrapped.losses[0]:.3f} -> {wrapped.losses[-1]:.3f}")
    console.print(
        f"all {STEPS} losses and all weights equal to the first card's, to the bit: "
        f"[bold]{'yes' if same else 'NO'}[/]\n"
    )
    show(console, plain, wrapped)
    console.print(
        "\nMeasured on the simulated device: bytes as on a card, speed and workspaces "
        "of this machine's CPU."
    )
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
