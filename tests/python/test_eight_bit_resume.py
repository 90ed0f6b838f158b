"""Training with 8-bit state, saved and resumed under wrap: the same bits as unbroken.

What is saved is torch's format, and what loads it is most often torch's own AdamW: it
becomes 8-bit at its first step.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import memscale
from memscale import Config
from memscale.optim import AdamW8bit, from_8bit, is_8bit, to_8bit
from memscale.optim import state as optim_state
from optim_cases import all_params, assert_same, make_params, train
from replay_twins import Block

WIDTH, ROWS = 128, 64
CONFIG = Config(use_8bit_optimizer=True, force_optimize=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(2))).to(dtype)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        batch = torch.randn(ROWS, WIDTH).to(next(model.parameters()).dtype)
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _unbroken(dtype: torch.dtype) -> tuple[nn.Module, Any, Any]:
    """Model and optimizer after six steps, and what was saved after three."""
    model = memscale.wrap(_model(dtype), CONFIG)
    optimizer = _adamw(model)
    _train(model, optimizer, range(3))
    saved = _through_a_file((model.state_dict(), optimizer.state_dict()))
    _train(model, optimizer, range(3, 6))
    return model, optimizer, saved


def _load_then_wrap(model: nn.Module, optimizer: Any, load: Callable[[], None]) -> None:
    load()
    memscale.wrap(model, CONFIG)


def _wrap_then_load(model: nn.Module, optimizer: Any, load: Callable[[], None]) -> None:
    memscale.wrap(model, CONFIG)
    load()


def _step_then_load(model: nn.Module, optimizer: Any, load: Callable[[], None]) -> None:
    memscale.wrap(model, CONFIG)
    _train(model, optimizer, range(1))
    load()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [_load_then_wrap, _wrap_then_load, _step_then_load])
def test_a_loop_resumes_bit_equal(way: Any, dtype: torch.dtype) -> None:
    expected, its_optimizer, (weights, state) = _unbroken(dtype)
    model = _model(dtype)
    optimizer = _adamw(model)

    def load() -> None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)

    way(model, optimizer, load)
    _train(model, optimizer, range(3, 6))
    assert is_8bit(optimizer)
    assert_same(optimizer, its_optimizer)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_accelerates_optimizer_resumes_bit_equal() -> None:
    _, its_optimizer, (weights, state) = _unbroken(torch.float32)
    model = _model()
    model, optimizer = Accelerator(cpu=True).prepare(model, _adamw(model))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    memscale.wrap(model, CONFIG)
    _train(model, optimizer, range(3, 6))
    assert_same(optimizer.optimizer, its_optimizer)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_resumes_bit_equal(tmp_path: Path, bf16: bool) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    weights = []
    for resume in (False, True):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 64}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=32, **sizes))
        rows = torch.randint(100, (16, 32), generator=torch.Generator().manual_seed(1))
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model.to(dtype), arguments, train_dataset=data)
        memscale.wrap(trainer, CONFIG)
        folder = str(tmp_path / "checkpoint-2")
        trainer.train(resume_from_checkpoint=folder if resume else None)
        weights.append([p.detach().clone() for p in model.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        assert torch.equal(ours, theirs)


# ---- a torch optimizer that has loaded a state_dict of ours ----


def _loaded(dtype: torch.dtype, ours: torch.optim.Optimizer) -> Any:
    theirs = torch.optim.AdamW(make_params(dtype))
    with torch.no_grad():
        for p, q in zip(all_params(theirs), all_params(ours), strict=True):
            p.copy_(q)
    theirs.load_state_dict(_through_a_file(ours.state_dict()))
    return theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_by_torch_in_between(dtype: torch.dtype) -> None:
    """ours -> torch's -> ours, and torch's has not stepped."""
    ours = AdamW8bit(make_params(dtype))
    train(ours)
    again = AdamW8bit(make_params(dtype))
    again.load_state_dict(_through_a_file(_loaded(dtype, ours).state_dict()))
    for p, q in zip(all_params(ours), all_params(again), strict=True):
        for key, value in ours.state[p].items():
            assert torch.equal(value, again.state[q][key]), key


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_what_torch_has_stepped_is_quantised_anew(dtype: torch.dtype) -> None:
    ours = AdamW8bit(make_params(dtype))
    train(ours)
    theirs = _loaded(dtype, ours)
    train(theirs, 4, 1)
    before = [theirs.state[p]["exp_avg"].clone() for p in all_params(theirs)]
    assert to_8bit(theirs) is None
    from_8bit(theirs)
    for p, moment in zip(all_params(theirs), before, strict=True):
        error = (theirs.state[p]["exp_avg"] - moment).abs().max()
        assert error <= 0.01 * moment.abs().max()
        assert theirs.state[p]["step"] == 5


def test_a_failed_conversion_leaves_the_scales(monkeypatch: Any) -> None:
    ours = AdamW8bit(make_params())
    train(ours)
    theirs = _loaded(torch.float32, ours)
    convert, done = optim_state.to_8bit, []

    def fails(p: Any, state: Any) -> Any:
        if done:
            raise torch.OutOfMemoryError("stand-in")
        done.append(p)
        return convert(p, state)

    with monkeypatch.context() as broken:
        broken.setattr(optim_state, "to_8bit", fails)
        with pytest.raises(torch.OutOfMemoryError):
            to_8bit(theirs)
    assert done
    assert to_8bit(theirs) is None
    assert_same(theirs, ours)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_of_it_stays_in_the_groups(dtype: torch.dtype) -> None:
    ours = AdamW8bit(make_params(dtype))
    train(ours)
    theirs = _loaded(dtype, ours)
    assert to_8bit(theirs) is None
    assert theirs.param_groups[0].keys() == ours.param_groups[0].keys()
    again = AdamW8bit(make_params(dtype))
    again.load_state_dict(ours.state_dict())
    assert again.param_groups[0].keys() == ours.param_groups[0].keys()


def test_floats_are_in_a_file_once() -> None:
    """At 32 bits the exact state of bfloat16 parameters is the saved one."""
    ours = AdamW8bit(make_params(torch.bfloat16), bits=32)
    train(ours)
    saved = ours.state_dict()
    exact = saved["param_groups"][0]["exact_state_of_params"]
    assert exact.keys() == saved["state"].keys()
    for i, state in exact.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key] is saved["state"][i][key]
