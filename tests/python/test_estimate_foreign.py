"""Estimates of models with odd convolutions, layouts and depth are exact, too."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memscale
from memscale.memory import track
from memscale.trace import told


def measured(model: nn.Module, x: torch.Tensor, estimate: memscale.Estimate) -> int:
    """The peak of a real step that has its optimizer's state."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> int:
        gc.collect()
        with track("cpu") as memory:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return memory.peak - memory.before

    step()
    return step() + estimate.timeline.resident


def error(model: nn.Module, x: torch.Tensor) -> float:
    """Of the estimate, in parts of the measured peak; positive: too high."""
    estimate = memscale.estimate(model, x, loss_fn=mean_square)
    return estimate.peak_bytes / measured(model, x, estimate) - 1


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SIDES = (256, 32, 16)


def u_shaped(dims: int) -> nn.Module:
    down: Any = CONVOLUTIONS[dims - 1]
    up: Any = TRANSPOSED[dims - 1]
    return nn.Sequential(
        down(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        down(8, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        down(32, 32, 3, padding=1),
        nn.ReLU(),
        up(32, 8, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        up(8, 2, 2, stride=2),
    )


def grouped(dims: int) -> nn.Module:
    kind: Any = CONVOLUTIONS[dims - 1]
    return nn.Sequential(
        kind(1, 32, 3, padding=1),
        nn.GELU(),
        kind(32, 32, 7, padding=3, groups=32),
        nn.GELU(),
        kind(32, 32, 3, padding=1, groups=4),
        nn.GELU(),
        kind(32, 20, 4, stride=4),
    )


@pytest.mark.parametrize(
    ("make", "dims", "batch"),
    list(itertools.product((u_shaped, grouped), (1, 2, 3), (1, 2))),
)
def test_convolutions(make: Callable[[int], nn.Module], dims: int, batch: int) -> None:
    x = torch.randn(batch, 1, *[SIDES[dims - 1]] * dims)
    assert -0.001 <= error(make(dims), x) <= 0.01


class Transposed(nn.Module):
    """As in PatchTST: batch norm over features that are the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.q(y) * self.k(y)


def test_batch_norm_of_a_transposed_input() -> None:
    model = nn.Sequential(*[Transposed() for _ in range(3)])
    assert abs(error(model, torch.randn(32, 32, 64))) <= 0.0005


class Patches(nn.Module):
    """As in ConvNeXt: channels last, down to a single pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 4, stride=4)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Conv2d(16, 64, 8, stride=8)
        self.each = nn.Conv2d(64, 64, 7, padding=3, groups=64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = self.down(y).permute(0, 2, 3, 1)
        return self.each((y * 2).permute(0, 3, 1, 2))


def test_pixels_with_channels_last() -> None:
    assert abs(error(Patches(), torch.randn(2, 3, 32, 32))) <= 0.01


class Dropped(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.rate:
                continue
            x = layer(x).relu()
        return x


def test_layer_drop_is_predicted_in_full_depth_and_said() -> None:
    estimate = memscale.estimate(Dropped(0.3), torch.randn(4, 8))
    ops = [estimate.trace[i].name for i in range(len(estimate.trace))]
    assert ops.count("aten::addmm") == 3
    assert any("layer drop" in note for note in estimate.notes)
    assert "layer drop" in str(estimate)


def test_layer_drop_that_is_off_is_not_said() -> None:
    assert memscale.estimate(Dropped(0.0), torch.randn(4, 8)).notes == []


class Trilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.bilinear(x[:, :6], x[:, :7], self.weight)


def test_an_expensive_op_without_a_counter_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told._tell_uncounted.cache_clear()
    for _ in range(2):
        estimate = memscale.estimate(Trilinear(), torch.randn(4, 8))
    assert estimate.uncounted_ops == ["aten::_trilinear"]
    assert any("flops" in n and "aten::_trilinear" in n for n in estimate.notes)
    assert "aten::_trilinear" in str(estimate)
    assert len([m for m in caplog.messages if "aten::_trilinear" in m]) == 1


def test_ops_that_are_counted_are_not_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(2, 3, 8, 8)
    model(x)
    assert memscale.estimate(model, x).uncounted_ops == []


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_buckets_of_distributed_data_parallel(
    views: bool, inside: bool, group: None
) -> None:
    gc.collect()
    with track("cpu") as memory:
        before = memory.before
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)]
    model = nn.Sequential(*layers, nn.Linear(64, 64))
    model[0].bias.requires_grad_(False)
    x = torch.randn(32, 64)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        gc.collect()
        with track("cpu") as memory:
            mean_square(parallel(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    estimate = memscale.estimate(
        model if inside else parallel, x, optimizer, loss_fn=mean_square
    )
    assert abs(estimate.peak_bytes - (memory.peak - before)) <= 1024
    assert any("buckets" in note for note in estimate.notes)


def test_a_model_beside_a_parallel_one_has_no_buckets(group: None) -> None:
    parallel = DistributedDataParallel(nn.Linear(8, 8))
    estimate = memscale.estimate(nn.Linear(8, 8), torch.randn(2, 8))
    assert estimate.notes == []
    del parallel
