"""Several cards, and streams beside the default one."""

from __future__ import annotations

import pytest
import standin
import torch
from cuda_models import gpt2, mlp, peak_of_step, step
from torch import nn

import memscale
from memscale import Config

QUIET = {"enable_logging": False}


@pytest.mark.machine(devices=2)
def test_a_model_on_the_second_card() -> None:
    model, batch = mlp("cuda:1")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, batch, optimizer)
    with memscale.memory.track("cuda:1") as plain:
        step(model, batch, optimizer)
    executor = memscale.wrap(model, Config(**QUIET))._memscale_executor
    step(model, batch, optimizer)
    with (
        memscale.memory.track("cuda:1") as wrapped,
        standin.recorded() as record,
    ):
        step(model, batch, optimizer)
    assert executor.plan.device == "cuda:1"
    assert wrapped.peak < plain.peak
    assert {launch.device for launch in record.launches} == {1}
    assert torch.cuda.memory_reserved(0) == 0
    assert executor.stats().calls_unlike_keep_set == 0


class Halves(nn.Module):
    """Its blocks lie on two cards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mlp("cuda:0")[0].blocks
        self.second = mlp("cuda:1")[0].blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.second(self.first(x).to("cuda:1")).square().mean()
        return loss


@pytest.mark.machine(devices=2)
def test_a_model_on_two_cards() -> None:
    torch.zeros(1, device="cuda:1")
    model = Halves()
    batch = torch.zeros(4096, 256, device="cuda:0")
    held = []

    def train() -> None:
        for device in (0, 1):
            torch.cuda.reset_peak_memory_stats(device)
        model(batch).backward()
        model.zero_grad()
        held.append([torch.cuda.max_memory_allocated(d) for d in (0, 1)])

    train()
    train()
    memscale.replay.attach(model, "block")
    train()
    _, plain, wrapped = held
    assert wrapped[0] < plain[0]
    assert wrapped[1] < plain[1]


def test_a_step_on_a_side_stream_replays_there() -> None:
    """Backward runs on the stream of forward, and replay with it."""
    model, batch = gpt2()
    handle = memscale.replay.attach(model, "block")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), standin.recorded() as record:
        model(batch).backward()
    torch.cuda.current_stream().wait_stream(side)
    assert handle.stats().ops_replayed > 0
    assert {launch.stream for launch in record.launches} == {side.cuda_stream}
    assert handle.stats().saves_dropped > 0


def test_wrapped_training_on_a_side_stream_follows_its_plan() -> None:
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    executor = memscale.wrap(model, Config(**QUIET))._memscale_executor
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            wrapped = peak_of_step(model, batch, optimizer)
    assert executor.stats().calls_unlike_keep_set == 0
    assert wrapped < executor.plan.plain_peak_bytes
