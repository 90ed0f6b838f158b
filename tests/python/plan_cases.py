"""Small models for plans, traced for the simulated device, and one way to run them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from memscale.benchmarks.measure import forward, loss_of
from memscale.benchmarks.models import BENCHMARK_MODELS, LossFn

_SMALL = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LLAMA = {
    **_SMALL,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_BERT = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}

# Of BENCHMARK_MODELS: batch, size and what is made small.
GOLDEN: dict[str, tuple[int, int, dict[str, Any]]] = {
    "gpt2": (
        4,
        128,
        {**_SMALL, "pad_token_id": None, "n_embd": 128, "n_layer": 6, "n_head": 4},
    ),
    "bert-base": (4, 64, _BERT),
    "distilbert": (
        *(4, 64),
        {"vocab_size": 512, "dim": 128, "n_layers": 3, "n_heads": 4, "hidden_dim": 512},
    ),
    "t5-small": (
        *(4, 64),
        {
            "vocab_size": 512,
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 256,
            "num_layers": 3,
            "num_heads": 4,
        },
    ),
    "llama-1b": (2, 128, _LLAMA),
    "mixtral-small": (2, 64, {**_LLAMA, "num_local_experts": 4}),
    "vit-base": (
        *(2, 64),
        {
            **{k: v for k, v in _BERT.items() if k != "vocab_size"},
            "image_size": 64,
            "num_labels": 10,
        },
    ),
    "resnet18": (32, 64, {"width": 32, "classes": 10}),
    "unet": (8, 64, {"width": 16, "depth": 3}),
    "lstm": (4, 32, {"vocabulary": 512, "width": 128}),
}


@dataclass(frozen=True)
class Case:
    model: nn.Module
    batch: Any
    loss_fn: LossFn | None = None


class TwiceCalled(nn.Module):
    """One layer that is called twice, and a block between the calls."""

    def __init__(self) -> None:
        super().__init__()
        width = 128
        self.shared = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(x)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.shared(x).square().mean()
        return out


def golden(name: str) -> Case:
    batch, size, overrides = GOLDEN[name]
    entry = BENCHMARK_MODELS[name]
    torch.manual_seed(0)
    return Case(
        entry.build(**overrides), entry.sample(batch, size, "cpu"), entry.loss_fn
    )


def case(name: str) -> Case:
    """On the CPU: golden, or tied, or a small CNN, or with a layer called twice."""
    torch.manual_seed(0)
    if name == "twice":
        return Case(TwiceCalled(), (torch.randn(512, 128),))
    if name == "cnn":  # the golden one is large to run
        entry = BENCHMARK_MODELS["resnet18"]
        return Case(entry.build(width=16, classes=10), entry.sample(16, 32, "cpu"))
    if name == "lstm-tied":
        batch, size, overrides = GOLDEN["lstm"]
        entry = BENCHMARK_MODELS["lstm"]
        return Case(
            entry.build(tied=True, **overrides), entry.sample(batch, size, "cpu")
        )
    return golden(name)


@dataclass
class Run:
    tensors: list[torch.Tensor] = field(default_factory=list)
    peak: int = 0  # of the last step


def run_on(
    device: torch.device,
    case: Case,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    steps: int = 2,
) -> Run:
    """Losses, gradients and parameters of some steps of a copy; the last's peak."""
    model = copy.deepcopy(case.model).to(device).train()
    batch = tree_map(
        lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, case.batch
    )
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    result = Run()
    for _ in range(steps):
        torch.accelerator.reset_peak_memory_stats()
        loss = loss_of(forward(model, batch), case.loss_fn)
        loss.backward()
        optimizer.step()
        result.peak = torch.accelerator.max_memory_allocated()
        result.tensors.append(loss.detach().cpu())
        result.tensors += [
            p.grad.cpu() for p in model.parameters() if p.grad is not None
        ]
        del loss
        optimizer.zero_grad()
    result.tensors += [p.detach().cpu() for p in model.parameters()]
    return result


def assert_same(a: Run, b: Run) -> None:
    assert len(a.tensors) == len(b.tensors)
    for i, (x, y) in enumerate(zip(a.tensors, b.tensors, strict=True)):
        assert torch.equal(x, y), f"tensor {i} differs"
