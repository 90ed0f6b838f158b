"""Models trained on CUDA torch: what wrap saves, and that its plan is followed."""

from __future__ import annotations

import pytest
import torch
from cuda_models import gpt2, mlp, peak_of_step, step
from measuring import UNPREDICTED, is_as_predicted

import memscale
from memscale import Config

QUIET = {"enable_logging": False}
MODELS = pytest.mark.parametrize("make", [mlp, gpt2])
AUTOCAST = pytest.mark.parametrize(
    "autocast", [None, torch.bfloat16], ids=["fp32", "bf16"]
)


@AUTOCAST
def test_wrapped_steps_hold_what_the_plan_says(autocast) -> None:
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, batch, optimizer, autocast)
    plain = peak_of_step(model, batch, optimizer, autocast)
    executor = memscale.wrap(model, Config(**QUIET))._memscale_executor
    for _ in range(2):  # the first makes the plan
        wrapped = peak_of_step(model, batch, optimizer, autocast)
    assert is_as_predicted(plain, executor.plan.plain_peak_bytes)
    assert is_as_predicted(wrapped, executor.plan.peak_bytes)
    assert executor.stats().calls_unlike_keep_set == 0


@MODELS
@AUTOCAST
def test_wrapped_steps_hold_less(make, autocast) -> None:
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, batch, optimizer, autocast)
    plain = peak_of_step(model, batch, optimizer, autocast)
    executor = memscale.wrap(model, Config(**QUIET))._memscale_executor
    step(model, batch, optimizer, autocast)
    assert peak_of_step(model, batch, optimizer, autocast) < 0.7 * plain
    assert executor.stats().saves_dropped > 0
    assert executor.stats().calls_unlike_keep_set == 0


@MODELS
def test_detached_as_never_wrapped(make) -> None:
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, batch, optimizer)
    plain = peak_of_step(model, batch, optimizer)
    held = torch.cuda.memory_allocated()
    memscale.wrap(model, Config(**QUIET))
    for _ in range(2):
        step(model, batch, optimizer)
    memscale.detach(model)
    assert peak_of_step(model, batch, optimizer) == plain
    assert torch.cuda.memory_allocated() == held


def test_a_budget_is_held_but_for_workspaces() -> None:
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, batch, optimizer)
    plain = peak_of_step(model, batch, optimizer)
    budget = plain // 2
    executor = memscale.wrap(model, Config(budget=budget, **QUIET))._memscale_executor
    for _ in range(3):
        wrapped = peak_of_step(model, batch, optimizer)
    assert executor.plan.budget == budget
    assert executor.plan.peak_bytes <= budget
    assert wrapped <= budget + UNPREDICTED
    assert executor.stats().calls_unlike_keep_set == 0


def test_a_budget_too_small_is_refused_with_the_smallest() -> None:
    model, batch = gpt2()
    with pytest.raises(memscale.PlanError, match="budget must be at least"):
        memscale.plan(model, batch, config=Config(budget="40MiB", **QUIET))


def test_grad_scaler() -> None:
    model, batch = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    memscale.wrap(model, Config(**QUIET))
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    executor = model._memscale_executor
    assert executor.stats().saves_dropped > 0
    assert executor.stats().calls_unlike_keep_set == 0


def test_gradient_accumulation_and_evaluation() -> None:
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    executor = memscale.wrap(model, Config(**QUIET))._memscale_executor
    for _ in range(2):
        for _ in range(3):
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(batch)
        model.train()
    assert executor.stats().calls_unlike_keep_set == 0


def test_nothing_is_left_on_the_card() -> None:
    """The fixture asserts it: a wrapped model that is dropped frees all it held."""
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    memscale.wrap(model, Config(**QUIET))
    for _ in range(2):
        step(model, batch, optimizer)
    model(batch)  # a forward whose backward never comes
