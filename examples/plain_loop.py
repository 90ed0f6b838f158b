"""A plain training loop, with MemScale: one line more.

    python examples/plain_loop.py --steps 5

Runs on a simulated card (no GPU is needed), twice, and prints both peaks: the losses
are the same to the last bit.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import memscale


def train(wrapped: bool, device: torch.device, steps: int) -> tuple[list[float], int]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if wrapped:
        memscale.wrap(model)  # the one line
    losses = []
    with memscale.memory.track(device) as memory:
        for _ in range(steps):
            x = torch.randn(16, 128, 128, device=device)
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, memory.peak


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    card = memscale.simdev.enable(memory="1GiB")
    plain, plain_peak = train(False, card, steps)
    ours, our_peak = train(True, card, steps)
    print(f"plain:   loss {plain[-1]:.6f}, peak {plain_peak:,} bytes")
    print(f"wrapped: loss {ours[-1]:.6f}, peak {our_peak:,} bytes")
    assert plain == ours
