"""Explicit keep sets, drawn at random: whatever stays, the training is the same."""

from __future__ import annotations

import random

import pytest
import torch

from memscale import replay
from memscale.model.inputs import read_call
from memscale.model.layers import find_layers
from memscale.trace.recording import record_step
from replay_training import ARCHITECTURES, first_difference, train

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

NAMES = ["gpt2", "encoder", "efficientnet", "gru", "unet", "mixtral"]


def draw(
    name: str, device: str, share: float, blocks_only: bool = False
) -> dict[str, replay.KeepSet]:
    """For each layer, so large a share of all its outputs."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name].build().to(device).train()
    batch = tuple(t.to(device) for t in ARCHITECTURES[name].batch())
    trace = record_step(model, read_call(batch), batch[0].device).trace
    ops: dict[str, list[str]] = {}
    for index in range(len(trace)):
        if trace[index].phase == "forward":
            ops.setdefault(trace[index].layer or "", []).append(trace[index].name)
    chance = random.Random(f"{name} {share}")
    blocks = find_layers(model).blocks
    return {
        layer: replay.KeepSet(
            names,
            [
                (op, i)
                for op in range(len(names))
                for i in range(3)
                if chance.random() < share
            ],
        )
        for layer, names in ops.items()
        if layer in blocks or not blocks_only
    }


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", NAMES)
def test_any_keep_set_trains_as_the_plain_model(
    name: str, device: str, share: float
) -> None:
    run = train(name, device, draw(name, device, share))
    assert first_difference(train(name, device, None), run) is None
    assert run.stats is not None
    assert run.stats.saves_dropped > 0


@pytest.mark.parametrize("name", ["gpt2", "encoder", "efficientnet"])
def test_blocks_follow_their_keep_sets(name: str) -> None:
    """The ops of a trace are those of a call, one for one."""
    dropped = []
    for share in (0.0, 0.5, 1.0):
        stats = train(name, "cpu", draw(name, "cpu", share, blocks_only=True)).stats
        assert stats is not None
        assert stats.calls_unlike_keep_set == 0
        dropped.append(stats.saves_dropped)
    assert dropped[0] > dropped[1] > dropped[2] == 0


def test_a_set_for_other_ops_is_noticed() -> None:
    """From the first op that differs on, the layer is treated as "cheap"."""
    sets = {
        layer: replay.KeepSet(["aten::none", *keep_set.ops], [])
        for layer, keep_set in draw("gpt2", "cpu", 0.5, blocks_only=True).items()
    }
    run = train("gpt2", "cpu", sets)
    assert first_difference(train("gpt2", "cpu", None), run) is None
    assert run.stats is not None
    # Two blocks, five steps.
    assert run.stats.calls_unlike_keep_set == 10
