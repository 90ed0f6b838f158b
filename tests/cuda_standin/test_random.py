"""Replayed dropouts on CUDA: the same seed and offset as in forward."""

from __future__ import annotations

import struct

import pytest
import standin
import torch
from cuda_models import mlp

from memscale import replay

# at::PhiloxCudaState: seed, offset (each 8 bytes), offset in a graph, captured.
PHILOX = standin.Argument("fused_dropout_kernel", 5, 16)


def dropouts(model: torch.nn.Module, batch: torch.Tensor) -> list[tuple[int, int]]:
    """Seed and offset of every dropout kernel of a step, forward's and replayed."""
    torch.cuda.manual_seed(7)
    with standin.recorded(PHILOX) as record:
        model(batch).backward()
    model.zero_grad()
    kernels = record.of("fused_dropout_kernel")
    return [struct.unpack("<QQ", launch.argument) for launch in kernels]


@pytest.mark.parametrize("policy", ["cheap", "block"])
def test_replayed_dropouts_draw_the_same_numbers(policy: str) -> None:
    model, batch = mlp()
    generator = torch.cuda.default_generators[0]
    plain = dropouts(model, batch)
    offset = generator.get_offset()
    assert len(set(plain)) == len(plain) == 6
    handle = replay.attach(model, policy)
    wrapped = dropouts(model, batch)
    assert wrapped[:6] == plain
    replayed = wrapped[6:]
    assert replayed, "no dropout was replayed"
    # Backward goes from the last block to the first.
    assert replayed == plain[::-1][: len(replayed)]
    assert generator.get_offset() == offset
    assert generator.initial_seed() == 7
    handle.detach()


def test_the_generator_goes_on_as_after_a_plain_step() -> None:
    """Dropouts after the step draw what they would have drawn after a plain one."""
    model, batch = mlp()
    dropouts(model, batch)
    after_plain = dropout_after()
    handle = replay.attach(model, "block")
    dropouts(model, batch)
    assert dropout_after() == after_plain
    handle.detach()


def dropout_after() -> list[bytes]:
    x = torch.zeros(1000, device="cuda", requires_grad=True)
    with standin.recorded(PHILOX) as record:
        torch.nn.functional.dropout(x, 0.1)
    return [launch.argument for launch in record.of("fused_dropout_kernel")]
