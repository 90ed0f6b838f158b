"""verify_correctness where the plain step does not fit the device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import models
from memscale import _C
from memscale.model.inputs import Call
from memscale.verify import verify_correctness as verify
from memscale.verify.fit import shorter, smaller
from stand_in import Block, StandIn, batch, net

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


# ---- what does not fit ----


def test_smaller_and_shorter_calls() -> None:
    call = Call(
        (torch.zeros(6, 8, dtype=torch.long),),
        {
            "mask": torch.ones(6, 1, 8, 8),
            "causal": torch.ones(6, 8, 8, dtype=torch.bool),
            "positions": torch.arange(8)[None],
            "features": torch.ones(6, 8, 8),  # as many as the sequence is long
            "weights": torch.ones(3),
        },
        torch.zeros(6),
    )
    names, calls = zip(*smaller(call), strict=True)
    assert names == ("batch 3 of 6", "batch 1 of 6")
    assert [list(t.shape) for t in calls[0].tensors()] == [
        *([3, 8], [3, 1, 8, 8], [3, 8, 8], [1, 8], [3, 8, 8], [3], [3]),
    ]
    names, calls = zip(*shorter(call), strict=True)
    assert names == ("sequence 4 of 8", "sequence 2 of 8", "sequence 1 of 8")
    assert [list(t.shape) for t in calls[0].tensors()] == [
        *([6, 4], [6, 1, 4, 4], [6, 4, 4], [1, 4], [6, 4, 8], [3], [6]),
    ]
    assert list(smaller(Call((torch.zeros(()),), {}))) == []
    assert list(shorter(Call((torch.zeros(4, 8),), {}))) == []  # features, it may be


def needed(model: nn.Module, sample: Any, device: torch.device) -> int:
    """Bytes of the plain step; what is on the device before it included."""
    return memscale.estimate(model, sample, None, device=device).peak_bytes


def tokens_model(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(4)
    return models.WithLoss(
        nn.Sequential(
            nn.Embedding(models.VOCABULARY, 32),
            *(Block(32) for _ in range(4)),
            nn.Linear(32, models.VOCABULARY),
        )
    )


def test_smaller_batch(
    sim: torch.device, sim_of: Callable[[int | str], torch.device]
) -> None:
    model, (x, y) = tokens_model(), models.tokens(16, 64)
    enough = needed(model, (x[:4], y[:4]), sim)
    device = sim_of(enough + 65536)
    model.to(device)
    report = verify(model, (x, y), policy="block", min_bytes=0)
    assert report.how == "batch 4 of 16"
    assert report.why.startswith("the plain step needs ")
    assert report.passed, report
    assert report.call == "int64[4, 64] on cpu, int64[4, 64] on cpu"
    assert f"batch 4 of 16, because {report.why}" in str(report)


def test_shorter_sequence(
    sim: torch.device, sim_of: Callable[[int | str], torch.device]
) -> None:
    model, (x, y) = tokens_model(), models.tokens(2, 512)
    enough = needed(model, (x[:1, :128], y[:1, :128]), sim)
    device = sim_of(enough + 65536)
    model.to(device)
    report = verify(model, (x, y), policy="block", min_bytes=0)
    assert report.how == "batch 1 of 2, sequence 128 of 512"
    assert report.passed, report
    report = verify(model, (x[:1], y[:1]), policy="block", min_bytes=0)
    assert report.how == "sequence 128 of 512"


class Wide(nn.Module):
    """A few vectors, much inside: the batch cannot be 1, and nothing is a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))
        self.norm = nn.BatchNorm1d(512)
        self.blocks = nn.ModuleList([Block(512) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x * self.scale)
        x = x.expand(256, *x.shape)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("wrong", [None, "blocks.3"])
def test_block_by_block(
    wrong: str | None,
    sim: torch.device,
    sim_of: Callable[[int | str], torch.device],
) -> None:
    torch.manual_seed(6)
    model, sample = Wide(), torch.randn(2, 512)
    full = needed(model, sample, sim)
    blocks = sum(p.numel() * 4 for p in model.parameters())
    device = sim_of((full + blocks) // 2)
    model.to(device)
    if wrong is None:
        report = verify(model, sample, policy="block", min_bytes=0)
    else:
        StandIn(model, wrong=wrong)
        report = verify(model, sample)
    assert report.how == "block by block"
    assert report.loss_equal is None
    assert report.passed == (wrong is None), report
    assert report.first_differing_layer == wrong
    if wrong is not None:
        assert all(f"{wrong}" in d.name for d in report.differing)
    assert report.unchecked == ["parameter scale: in no layer that was run"]
    assert any("does not take batch 1 of 2: ValueError" in n for n in report.notes)
    assert report.untrained == {}


def test_host_without_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    StandIn(model)
    size = sum(t.numel() * t.itemsize for t in (*model.parameters(), *model.buffers()))
    size += sum(p.numel() * p.itemsize for p in model.parameters())
    monkeypatch.setattr(
        _C, "detect_host", lambda: SimpleNamespace(available_memory=size)
    )
    assert verify(model, batch()).how == "block by block"  # on the CPU
    monkeypatch.setattr(
        _C, "detect_host", lambda: SimpleNamespace(available_memory=size - 1)
    )
    with pytest.raises(memscale.HardwareError, match="copies parameters and gradients"):
        verify(model, batch())


def test_out_of_memory_that_was_not_predicted(
    sim: torch.device, sim_of: Callable[[int | str], torch.device]
) -> None:
    class Decides(nn.Module):
        """Fake tensors cannot run it: a value decides."""

        def __init__(self) -> None:
            super().__init__()
            self.body = tokens_model()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if self.body.body[0].weight.sum().item() > 1e9:
                x = x + 1
            out: torch.Tensor = self.body(x, y)
            return out

    model, (x, y) = Decides(), models.tokens(16, 64)
    enough = needed(model.body, (x[:4], y[:4]), sim)
    device = sim_of(enough + 65536)
    model.to(device)
    report = verify(model, (x, y), policy="block", min_bytes=0)
    assert report.passed, report
    assert report.how == "batch 4 of 16"
    assert report.why == "the step ran out of memory"
    assert any("not predicted" in note for note in report.notes)


def test_block_by_block_of_layers_with_odd_arguments(
    sim: torch.device, sim_of: Callable[[int | str], torch.device]
) -> None:
    class Cache:
        def __init__(self) -> None:
            self.held: list[torch.Tensor] = []

    class Odds(nn.Module):
        """A shared layer, one that writes into its input, one that fills a cache."""

        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(512, 512)
            self.writes = nn.ReLU(inplace=True)
            self.fills = nn.ModuleList([Fills(), Fills()])
            self.norm = nn.BatchNorm1d(512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x).expand(512, *x.shape)
            x = self.writes(self.shared(self.shared(x)))
            cache = Cache()
            for layer in self.fills:
                x = layer(x, cache=cache)
            return x.square().mean()

    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            cache.held.append(torch.tanh(self.linear(x)))
            return torch.stack(cache.held).sum(0)

    torch.manual_seed(6)
    model, sample = Odds(), torch.randn(2, 512)
    full = needed(model, sample, sim)
    model.to(sim_of(full - 65536))
    report = verify(model, sample, policy="block", min_bytes=0)
    assert report.how == "block by block"
    assert report.passed, report
    assert report.unchecked == []
    # Of 2 calls of shared, 2 layers that fill, norm and writes: outputs, gradients of
    # inputs, of parameters; buffers of norm; 2 random states each.
    assert report.num_compared == 6 + (1 + 1 + 1 + 2 + 0 + 1) + 4 * 2 + 2 + 3 + 6 * 2
