"""The optimizers' operators: both paths, threads, temporaries, fakes."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import memscale
from memscale import _C
from memscale.optim import Adam8bit, AdamW8bit, to_8bit
from optim_cases import assert_same, make_params, same_bits, train

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim", "one_thread")

ops = torch.ops.memscale
GENERIC_BYTES = 8 << 20  # what optimizer_backend.h promises
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantised(values: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    codes = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
    absmax = torch.empty(-(-values.numel() // 256), device=values.device)
    ops.quantise_(codes, absmax, values, is_signed)
    return codes, absmax


def dequantised(codes: Tensor, absmax: Tensor, is_signed: bool) -> Tensor:
    values = torch.empty(codes.numel(), device=codes.device)
    ops.dequantise_(values, codes, absmax, is_signed)
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("stochastic_rounding", [False, True])
def test_both_paths_give_the_same_bits(
    sim: torch.device, dtype: torch.dtype, bits: int, stochastic_rounding: bool
) -> None:
    sizes = ((700, 601), (256,), (5, 1000), (1,))  # more than a piece, a short block
    options = {
        "bits": bits,
        "min_8bit_size": 0,
        "stochastic_rounding": stochastic_rounding,
        "lr": 0.01,
        "weight_decay": 0.1,
    }
    for kind, maximize in ((AdamW8bit, False), (Adam8bit, True)):
        here = kind(make_params(dtype, sizes), maximize=maximize, **options)
        there = kind(make_params(dtype, sizes, sim), maximize=maximize, **options)
        train(here, steps=3)
        train(there, steps=3)
        assert_same(here, there)


def odd_values(count: int) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(3))
    values *= torch.logspace(-42, 30, count)
    values[256:512] *= 0
    values[700], values[1000], values[1300] = math.nan, math.inf, -math.inf
    values[1536:1792] = 1e-42  # denormals: a block of zeros
    values[1800] = -values[1792:2048].abs().max() * 2
    for steep in (values[2048:2304], values[count // 256 * 256 :]):
        steep.copy_(torch.logspace(0, -44.85, len(steep)))  # down to the smallest
        steep[1::3] *= -1
    return values


@pytest.mark.parametrize("is_signed", [True, False])
def test_quantising_on_a_device(sim: torch.device, is_signed: bool) -> None:
    values = odd_values(300_000)
    codes, absmax = quantised(values, is_signed)
    there = quantised(values.to(sim), is_signed)
    assert torch.equal(codes, there[0].cpu())
    assert same_bits(absmax, there[1])
    assert same_bits(
        dequantised(codes, absmax, is_signed), dequantised(*there, is_signed)
    )


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_come_back_from_floats_and_absmax(
    sim: torch.device, is_signed: bool
) -> None:
    """Every code, at every magnitude: what saving and loading rests on."""
    absmax = torch.tensor(
        [2.0**e * f for e in range(-126, 128, 2) for f in (1.0, 1.0000001, 1.7)]
        + [torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny]
    )
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(absmax))
    for device in ("cpu", sim):
        scales = absmax.to(device)
        values = dequantised(codes.to(device), scales, is_signed)
        again = torch.empty_like(codes, device=device)
        ops.encode_(again, scales, values, is_signed)
        assert torch.equal(again.cpu(), codes)


@pytest.mark.parametrize("flush", [False, True])
def test_a_second_moment_never_becomes_zero(sim: torch.device, flush: bool) -> None:
    """Nor does a zero become more, where denormals are taken as zero."""
    values = torch.cat((torch.logspace(0, -44.85, 250), torch.zeros(6)))
    torch.set_flush_denormal(flush)
    try:
        for device in ("cpu", sim):
            codes, absmax = quantised(values.to(device), False)
            floats = dequantised(codes, absmax, False)
            again = torch.empty_like(codes)
            ops.encode_(again, absmax, floats, False)
            assert torch.equal((codes > 0).cpu(), values > 0)
            assert torch.equal(again, codes)
    finally:
        torch.set_flush_denormal(False)


def test_no_step_is_large_when_small_gradients_end(sim: torch.device) -> None:
    for device in ("cpu", sim):
        p = nn.Parameter(torch.zeros(8192, device=device))
        optimizer = AdamW8bit([p], lr=1e-3, weight_decay=0.0)
        p.grad = torch.ones_like(p)
        for step in range(40):
            p.grad[::30] = 1e-4 if step < 20 else 0.0
            before = p.detach().clone()
            optimizer.step()
            assert (p.detach() - before).abs().max() < 1.5e-3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=300), st.booleans())
def test_any_floats_come_back_as_themselves(values: list[float], sign: bool) -> None:
    codes, absmax = quantised(torch.tensor(values), sign)
    floats = dequantised(codes, absmax, sign)
    again = torch.empty_like(codes)
    ops.encode_(again, absmax, floats, sign)
    assert torch.equal(again, codes)


@pytest.mark.parametrize("bits", [8, 32])
def test_threads_change_no_bit(bits: int) -> None:
    sizes = ((1000, 301), (70_001,))
    one, two = (AdamW8bit(make_params(sizes=sizes), bits=bits) for _ in range(2))
    torch.set_num_threads(2)
    train(two)
    torch.set_num_threads(1)
    train(one)
    assert_same(one, two)


def test_a_second_thread_is_used() -> None:
    """In a process where nothing else has started one."""
    program = """
import os
import torch
import memscale
torch.set_num_threads(2)
codes = torch.empty(1 << 20, dtype=torch.uint8)
absmax, values = torch.empty(1 << 12), torch.empty(1 << 20)
before = len(os.listdir("/proc/self/task"))
torch.ops.memscale.quantise_(codes, absmax, values, True)
print(len(os.listdir("/proc/self/task")) - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_temporaries_on_the_cpu(dtype: torch.dtype) -> None:
    optimizer = AdamW8bit(make_params(dtype, ((1000, 700), (100,))))
    train(optimizer, steps=1)
    optimizer.step()
    with memscale.memory.track("cpu") as memory:
        optimizer.step()
    assert memory.peak == memory.before


@pytest.mark.parametrize("stochastic_rounding", [False, True])
@pytest.mark.parametrize("bits", [8, 32])
def test_temporaries_on_a_device_are_bounded(
    sim: torch.device, bits: int, stochastic_rounding: bool
) -> None:
    peaks = []
    for rows in (1000, 4000):
        optimizer = AdamW8bit(
            make_params(torch.bfloat16, ((rows, 700),), sim),
            bits=bits,
            stochastic_rounding=stochastic_rounding,
        )
        train(optimizer, steps=1)
        with memscale.memory.track(sim) as memory:
            optimizer.step()
        peaks.append(memory.peak - memory.before)
    assert 0 < peaks[0] == peaks[1] <= GENERIC_BYTES  # and 0: not the CPU's kernel


def test_maps_go_to_the_device_once_a_call(sim: torch.device) -> None:
    optimizer = AdamW8bit(make_params(sizes=((5000,),) * 4, device=sim))
    train(optimizer, steps=1)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        optimizer.step()
    copies = [
        e.input_shapes[0] for e in profile.function_events if "_to_copy" in e.name
    ]
    # The borders between codes; one set for each moment.
    assert copies.count([255]) == 2


def test_numbers_that_core_and_kernels_share() -> None:
    """core predicts what the kernels take without seeing them; the operators check
    how many blocks there are."""
    assert (_C.MIN_8BIT_ELEMENTS, _C.STATE_BLOCK, _C.STATE_PIECE) == (
        4096,
        256,
        1 << 18,
    )
    for function in (AdamW8bit.__init__, to_8bit):
        parameter = inspect.signature(function).parameters["min_8bit_size"]
        assert parameter.default == _C.MIN_8BIT_ELEMENTS
    values = torch.ones(2 * _C.STATE_BLOCK + 1)
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    ops.quantise_(codes, torch.empty(3), values, True)
    with pytest.raises(ValueError, match="absmax must be 3"):
        ops.quantise_(codes, torch.empty(2), values, True)


def test_state_of_two_bytes() -> None:
    optimizer = AdamW8bit(make_params(sizes=((1024, 1024),)))
    train(optimizer, steps=1)
    (state,) = optimizer.state.values()
    total = sum(t.untyped_storage().nbytes() for t in state.values())
    assert total == 2 * (1 << 20) + 2 * 4 * (1 << 12) + 4


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_unscale(device: str) -> None:
    for dtype in DTYPES:
        grads = [torch.randn(70_000).to(device, dtype), torch.ones(3, device=device)]
        expected = [g * 0.5 for g in grads]
        found = torch.zeros(1, device=device)
        ops.unscale_(grads, found, 0.5)
        assert all(map(torch.equal, grads, expected))
        assert not found.item()
        grads[0][69_999] = math.inf
        ops.unscale_(grads, found, 0.5)
        assert found.item()


@pytest.mark.parametrize(("bits", "per_parameter"), [(8, 2 + 2 * 4 / 256), (32, 8)])
def test_estimates_know_the_state(bits: int, per_parameter: float) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    x = torch.randn(2, 512)
    optimizer = AdamW8bit(model.parameters(), bits=bits)
    estimate = memscale.estimate(
        model, x, optimizer=optimizer, loss_fn=lambda output: output.sum()
    )
    count = 4 * 512 * 512
    assert estimate.breakdown["optimizer_state"] == pytest.approx(
        per_parameter * count, abs=64
    )
    # Nothing beside weights, gradients and state at the peak: no temporaries.
    rest = estimate.peak_bytes - (8 + per_parameter) * count
    assert rest < 100_000
    optimizer.set_bits(model[2].weight, 40 - bits)
    estimate = memscale.estimate(
        model, x, optimizer=optimizer, loss_fn=lambda output: output.sum()
    )
    mixed = (2 + 2 * 4 / 256) * (1 if bits == 32 else 3) + 8 * (3 if bits == 32 else 1)
    assert estimate.breakdown["optimizer_state"] == pytest.approx(
        mixed * 512 * 512, abs=64
    )


def test_wrong_tensors_are_refused() -> None:
    (p,) = make_params(sizes=((100,),))
    moments = torch.zeros(100)
    kwargs = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.9,
        "eps": 0.1,
        "weight_decay": 0.0,
        "decoupled": True,
    }
    step = torch.tensor(0.0)
    whole = torch.zeros(100, dtype=torch.long)
    with torch.no_grad():
        with pytest.raises(ValueError, match="m must be 100 dense elements"):
            ops.adam_([p], [p], [moments[1:]], [moments], [step], **kwargs)
        with pytest.raises(ValueError, match="grad must be of the parameter's shape"):
            ops.adam_([p], [p[1:]], [moments], [moments], [step], **kwargs)
        with pytest.raises(TypeError, match="param must be float32, bfloat16"):
            ops.adam_([whole], [whole], [moments], [moments], [step], **kwargs)
    assert step.item() == 0
