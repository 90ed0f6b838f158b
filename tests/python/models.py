"""Small models of each kind, and one way of training them that records all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

VOCABULARY = 96


class WithLoss(nn.Module):
    """Body, then cross entropy over the last dimension."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.body(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())


class HuggingFace(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=x, labels=y).loss
        return loss


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.layers = kind(24, 32, 2, dropout=0.1, batch_first=True, **options)
        width = 64 if options.get("bidirectional") else 32
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embedding(x))[0])
        return out


def gpt2(attention_dropout: float = 0.0) -> nn.Module:
    """Tied weights; dropout 0.1 everywhere but in the attention scores."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=48,
        n_embd=64,
        n_layer=3,
        n_head=4,
        attn_pdrop=attention_dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return HuggingFace(GPT2LMHeadModel(config))


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=48,
        attention_probs_dropout_prob=0.0,
    )
    return HuggingFace(BertForMaskedLM(config))


def cnn() -> nn.Module:
    return WithLoss(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout(0.2),
            nn.Conv2d(16, 32, 3, stride=2, groups=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, VOCABULARY),
        )
    )


def lstm(bidirectional: bool = True) -> nn.Module:
    return WithLoss(Recurrent(nn.LSTM, bidirectional=bidirectional))


def gru() -> nn.Module:
    return WithLoss(Recurrent(nn.GRU))


def tokens(batch: int = 2, length: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (batch, length))
    return ids, ids.roll(-1, dims=1)


def images(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, 32, 32), torch.randint(VOCABULARY, (batch,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple]]] = {
    "gpt2": (gpt2, tokens),
    "bert": (bert, tokens),
    "cnn": (cnn, images),
    "lstm": (lstm, tokens),
}


@dataclass
class Step:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


@dataclass
class Run:
    steps: list[Step] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    model: nn.Module | None = None


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().cpu().clone() for name, t in tensors.items()}


def train(
    model: nn.Module, batch: tuple[torch.Tensor, ...], device: str, steps: int = 5
) -> Run:
    """Train a copy of ``model`` on ``device`` from seed 7; record every step."""
    model = copy.deepcopy(model).to(device).train()
    moved = [t.to(device) for t in batch]
    # foreach on both: the default differs between CPU and accelerators.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    run = Run(model=model)
    torch.manual_seed(7)
    for _ in range(steps):
        if device != "cpu":
            torch.accelerator.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss = model(*moved)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            run.peaks.append(torch.accelerator.max_memory_allocated())
        gradients = {
            n: p.grad for n, p in model.named_parameters() if p.grad is not None
        }
        run.steps.append(
            Step(loss.detach().cpu(), _on_cpu(gradients), _on_cpu(model.state_dict()))
        )
    return run


def first_difference(a: Run, b: Run) -> str | None:
    """The first tensor that is not the same to the bit, or None."""
    for i, (x, y) in enumerate(zip(a.steps, b.steps, strict=True)):
        if not torch.equal(x.loss, y.loss):
            return f"step {i}: loss {x.loss.item()!r} and {y.loss.item()!r}"
        for what, left, right in (
            ("gradient", x.gradients, y.gradients),
            ("state", x.state, y.state),
        ):
            assert left.keys() == right.keys()
            for name in left:
                if not torch.equal(left[name], right[name]):
                    return f"step {i}: {what} {name}"
    return None


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16, bias=bias),
        nn.Tanh(),
        nn.Linear(16, 16, bias=bias),
        nn.Tanh(),
        nn.Linear(16, 4, bias=bias),
    )


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()
