"""Models to train here, and one way of training them."""

from __future__ import annotations

import torch
import transformers
from torch import nn


class Block(nn.Module):
    """A feed-forward block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(x))
        out: torch.Tensor = x + self.down(nn.functional.dropout(hidden, 0.1))
        return out


class Mlp(nn.Module):
    """Blocks, then the mean square as loss."""

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.blocks(x).float().square().mean()
        return loss


def mlp(device: str = "cuda") -> tuple[nn.Module, torch.Tensor]:
    return Mlp().to(device), torch.zeros(4096, 256, device=device)


class LanguageModel(nn.Module):
    """A small GPT-2 that returns its loss."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=1024, n_positions=128, n_embd=256, n_layer=layers, n_head=4
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def gpt2(layers: int = 6, batch: int = 16) -> tuple[nn.Module, torch.Tensor]:
    ids = torch.zeros(batch, 128, dtype=torch.long, device="cuda")
    return LanguageModel(layers).cuda().train(), ids


def step(
    model: nn.Module,
    batch: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    autocast: torch.dtype | None = None,
) -> None:
    with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
        loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_of_step(
    model: nn.Module,
    batch: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    autocast: torch.dtype | None = None,
) -> int:
    """The most bytes that tensors asked for at one instant of a step, weights too.

    The allocator hands out more, by what it does not split off, which depends on all
    that was allocated before.
    """
    torch.cuda.reset_peak_memory_stats()
    step(model, batch, optimizer, autocast)
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
