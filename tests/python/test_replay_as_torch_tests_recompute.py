"""What torch's tests say that checkpointing checks, or that it cannot survive.

Forwards that differ from call to call, state that changes before backward, errors
in the middle, several threads: replay runs ops again, never a model's code.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from replay_twins import WIDTH, Wrapped, batch, blocks, twins

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

both_policies = pytest.mark.parametrize("policy", ["cheap", "block"])
both_devices = pytest.mark.parametrize("device", ["cpu", "sim"])


@both_policies
def test_forward_that_differs_each_time(policy: str) -> None:
    """Checkpointing reports other ops, or other shapes, in the second run."""
    calls = iter(range(100))

    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        return y.sin().exp() if next(calls) % 4 < 2 else torch.cat([y, y.cos()])

    pair = twins(Wrapped(function), policy)
    # Deep copies share the iterator: two calls a step, alike for both.
    for _ in range(4):
        pair.assert_same_step(batch())


@both_policies
def test_state_changed_between_forward_and_backward(policy: str) -> None:
    """A flag, a mode and autocast are what they were in forward."""
    pair = twins(blocks(), policy)

    def step(model: nn.Module) -> None:
        loss = model(batch()).sum()
        model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        model.train()

    pair.both(step)
    pair.assert_equal_gradients()


def test_default_type_changed_between_forward_and_backward() -> None:
    """Factories that name no type made what they made."""

    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ weight * torch.randn(WIDTH) * torch.rand(WIDTH)
        return y.exp() * torch.arange(0.0, WIDTH)

    pair = twins(Wrapped(function), "block")

    def step(model: nn.Module) -> None:
        loss = model(batch() / 4).sum()
        torch.set_default_dtype(torch.float64)
        try:
            loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)

    pair.both(step)
    pair.assert_equal_gradients()


@both_policies
def test_parts_called_without_the_whole(policy: str) -> None:
    pair = twins(blocks(), policy)

    def step(model: nn.Module) -> None:
        x = batch()
        for block in reversed(list(model.children())):
            x = block(x)
        x.sum().backward()

    pair.both(step)
    pair.assert_equal_gradients()
    assert pair.handle.stats().saves_dropped > 0


class Failing(Exception):
    pass


@contextlib.contextmanager
def failing_forward(model: nn.Module, which: int) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise Failing

    handle = model[which].dropout.register_forward_hook(fail)  # type: ignore[index]
    try:
        yield
    finally:
        handle.remove()


@both_devices
@both_policies
def test_errors_leave_it_fit_for_the_next_step(policy: str, device: str) -> None:
    pair = twins(blocks(), policy, device)
    with failing_forward(pair.ours, 1), pytest.raises(Failing):
        pair.ours(batch(device))
    pair.assert_same_step(batch(device))

    loss = pair.ours(batch(device)).sum()
    weight = pair.ours[1].first.weight  # type: ignore[index,union-attr]

    def fail(_: torch.Tensor) -> None:
        raise Failing

    hook = weight.register_hook(fail)
    with pytest.raises(Failing):
        loss.backward()
    hook.remove()
    pair.assert_same_step(batch(device))


@both_policies
def test_without_gradient_nothing_is_taped(policy: str) -> None:
    pair = twins(blocks(), policy)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            plain, ours = pair.both(lambda model: model(batch()))
        assert torch.equal(plain, ours)
    stats = pair.handle.stats()
    assert (stats.saves_kept, stats.saves_dropped, stats.ops_replayed) == (0, 0, 0)
    pair.assert_same_step(batch())


@both_devices
def test_threads_train_models_of_their_own(device: str) -> None:
    pairs = [twins(blocks(p=0.0), "block", device) for _ in range(3)]
    threads = [
        threading.Thread(target=lambda m=m: m(batch(device)).sum().backward())
        for pair in pairs
        for m in (pair.plain, pair.ours)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pair in pairs:
        pair.assert_equal_gradients()


@both_devices
def test_threads_share_a_model(device: str) -> None:
    """Calls of one model at once: each thread's graph is its own."""
    pair = twins(blocks(p=0.0), "block", device)
    inputs = [batch(device, rows=rows) for rows in range(2, 8)]

    def slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(model(x).sum(), next(model.parameters()))[0]

    expected = [slope(pair.plain, x) for x in inputs]
    with ThreadPoolExecutor(len(inputs)) as pool:
        for _ in range(5):
            found = pool.map(lambda x: slope(pair.ours, x), inputs)
            assert all(map(torch.equal, expected, found))


@both_policies
def test_backward_in_another_thread(policy: str) -> None:
    pair = twins(blocks(), policy)

    def step(model: nn.Module) -> None:
        thread = threading.Thread(target=model(batch()).sum().backward)
        thread.start()
        thread.join()

    pair.both(step)
    pair.assert_equal_gradients()
