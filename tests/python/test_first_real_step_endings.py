"""How the recording of a first real step ends, and what it leaves."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn

import memscale
from compat_twins import (
    batch,
    config_of,
    executor_of,
)
from memscale.calls.optimizer_steps import stop_watching
from never_wrapped import assert_as_never_wrapped
from untraceable import (
    Branching,
    make,
    train,
)


def test_nothing_is_left_behind() -> None:
    # A model that was dropped leaves the one hook there is, until the next one stops.
    stop_watching(nn.Module())  # type: ignore[arg-type]
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    model = make(Branching)
    memscale.wrap(model, config_of())
    model(batch())
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks + 1
    memscale.detach(model)  # in the middle of the step that is recorded
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
    plain = make(Branching)
    plain(batch())
    assert_as_never_wrapped(model, plain)
    memscale.wrap(model, config_of())
    train(model)
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks


def test_a_model_that_is_dropped_leaves_its_thread_free() -> None:
    model = make(Branching)
    memscale.wrap(model, config_of())
    model(batch())
    gone = weakref.ref(model)
    del model
    assert gone() is None
    other = make(Branching)
    memscale.wrap(other, config_of())
    train(other)
    assert executor_of(other).plan is not None


def test_a_step_that_another_thread_ends(caplog: pytest.LogCaptureFixture) -> None:
    model = make(Branching)
    memscale.wrap(model, config_of())
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()).square().mean().backward()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    train(model)
    assert "ended by another thread" in caplog.text
    other = make(Branching)  # this thread can be recorded again
    memscale.wrap(other, config_of())
    train(other)
    assert executor_of(other).plan is not None
