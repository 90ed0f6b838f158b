"""One training step: what estimate, plan, pareto and explain_oom are all about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memscale
from memscale import Config, InputError
from memscale._C import plan_for
from memscale.estimation.estimate import estimate_step
from memscale.planning import question_of
from memscale.techniques import as_wrapped
from memscale.trace.training_step import TrainingStep
from plan_cases import case


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=128, n_positions=64)
    )


def _ids() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 64, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_there_is_one_plain_peak(
    device: str, use_cache: bool, sim: torch.device
) -> None:
    """Caches are let go by a technique: the plain step is the same for all."""
    model = _gpt2()
    model.config.use_cache = use_cache
    config = Config(force_optimize=True)
    estimate = memscale.estimate(model, _ids(), "adamw", device=device)
    plan = memscale.plan(model, _ids(), "adamw", config, device=device)
    assert plan.plain_peak_bytes == estimate.peak_bytes
    assert (plan.find_choice("use_cache") is not None) == use_cache
    for each in memscale.pareto(model, _ids(), "adamw", device=device, max_plans=3):
        assert each.plain_peak_bytes == estimate.peak_bytes


@pytest.mark.parametrize("name", ["cnn", "lstm-tied", "twice"])
def test_there_is_one_plain_peak_of_other_models(name: str, sim: torch.device) -> None:
    one = case(name)
    arguments: tuple[Any, ...] = (one.model, one.batch, "sgd", None, one.loss_fn)
    estimate = memscale.estimate(*arguments, device="sim")
    plan = memscale.plan(*arguments, device="sim")
    assert plan.plain_peak_bytes == estimate.peak_bytes


def test_without_its_rule_a_cache_is_held(sim: torch.device) -> None:
    model = _gpt2()
    step = TrainingStep.of(model, _ids(), "adamw", device="sim")
    config = Config(force_optimize=True, enable_checkpointing=False)
    traced = as_wrapped(lambda: estimate_step(step, config))
    question = question_of(traced, config, "GPT2", model, "adamw")
    plan = plan_for(question)
    cache = plan.find_choice("use_cache")
    assert cache is not None
    assert cache.bytes == 3 * 2 * 2 * 64 * 64 * 4  # layers, keys and values, batch
    question.disabled_rules = ["forget_cache"]
    held = plan_for(question)
    assert held.choices == []
    assert held.peak_bytes == held.plain_peak_bytes == plan.plain_peak_bytes


def test_is_checked_when_it_is_made() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        TrainingStep.of("model")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="loss_fn must be callable"):
        TrainingStep.of(model, torch.zeros(2, 4), loss_fn=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch must be a positive integer"):
        TrainingStep.of(model, torch.zeros(2, 4), batch=0)
    step = TrainingStep.of(model, torch.zeros(2, 4), "sgd", device="RTX 3090")
    assert (step.target, step.device.type) == ("RTX 3090", "sim")
    assert step.card is not None
    assert TrainingStep.of(model, torch.zeros(2, 4)).card is None


def test_a_tensor_that_is_passed_twice_is_changed_once() -> None:
    """As the batch of a loss_fn that takes all of it."""

    def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (output - batch["x"]).square().mean()

    batch = {"x": torch.zeros(2, 4)}
    call = TrainingStep.of(nn.Identity(), batch, None, loss_fn).call
    changed = call.map_tensors(torch.clone)
    assert changed.target["x"] is changed.kwargs["x"]
