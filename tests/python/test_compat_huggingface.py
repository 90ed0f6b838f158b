"""Hugging Face: generate, Trainer, peft, and checkpointing of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import memscale
from compat_huggingface import fine_tune, gpt2, llama, tokens
from compat_twins import (
    Record,
    assert_same,
    check_twins,
    config_of,
    each_mode,
    executor_of,
    make,
    run,
    untouched_process,  # noqa: F401
)
from memscale import OptimizationMode as Mode
from never_wrapped import assert_as_never_wrapped


@each_mode
@pytest.mark.parametrize("build", [gpt2, llama])
def test_fine_tuning(mode: Mode, build: Any) -> None:
    executor = check_twins(fine_tune, mode, build)
    assert len(executor.plans) == 1


@each_mode
def test_generate_costs_nothing(mode: Mode) -> None:
    """The cache is on, no op is recorded, no plan is made: also between steps."""
    plain, ours = make(gpt2), make(gpt2)
    memscale.wrap(ours, config_of(mode))
    executor = executor_of(ours)
    caches: list[Any] = []
    ours.transformer.register_forward_hook(
        lambda m, a, out: caches.append(out.past_key_values)
    )

    def write(model: nn.Module) -> torch.Tensor:
        model.eval()
        text = model.generate(
            tokens(rows=1)[:, :8], max_new_tokens=6, do_sample=True, pad_token_id=0
        )
        model.train()
        return text

    for trained in (False, True):
        if trained:
            assert_same(run(fine_tune, plain), run(fine_tune, ours))
            # Filled, as the plain model's are, and let go.
            kept = [type(layer.keys) for cache in caches for layer in cache.layers]
            assert kept
            assert torch.Tensor not in kept
        executor.reset_stats()
        plans = len(executor.plans)
        caches.clear()
        torch.manual_seed(2)
        expected = write(plain)
        torch.manual_seed(2)
        assert torch.equal(expected, write(ours))
        assert executor.stats().ops_recorded == 0
        assert len(executor.plans) == plans
        assert ours.config.use_cache is True
        assert len(caches) > 0
        assert all(cache is not None for cache in caches)
        caches.clear()


def test_use_cache_after_an_interrupt() -> None:
    """Ctrl-C in a training step, then generate: the cache is on again."""
    model = memscale.wrap(make(gpt2), config_of())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.transformer.h[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=tokens())
    handle.remove()
    with torch.no_grad():
        assert model(input_ids=tokens()).past_key_values is not None
    assert model.config.use_cache is True


@each_mode
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_enable(mode: Mode, reentrant: bool) -> None:
    def build() -> nn.Module:
        model = gpt2()
        options = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
        return model

    # What reentrant checkpointing leaves to save is not worth recomputing.
    check_twins(fine_tune, mode, build, drops=None if reentrant else True)


# ---- Trainer ----


def trainer_of(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        warmup_steps=1,
        logging_strategy="no",
        report_to=[],
        save_strategy="no",
        seed=3,
        disable_tqdm=True,
        **options,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens(rows=16)]
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])


@each_mode
@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(mode: Mode, bf16: bool, tmp_path: Path) -> None:
    """wrap(trainer) trains as the plain Trainer does, and evaluates, and saves."""
    models, losses = [], []
    for wrapped in (False, True):
        trainer = trainer_of(make(gpt2), tmp_path / str(wrapped), bf16=bf16)
        if wrapped:
            assert memscale.wrap(trainer, config_of(mode)) is trainer
        model = trainer.model
        losses.append(trainer.train().training_loss)
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.save_model()
        models.append(model)
        if wrapped:
            assert executor_of(model).stats().saves_dropped > 0
            # The second micro-batch of a step adds to gradients: a kind of its own.
            assert len(executor_of(model).plans) == 2
            memscale.detach(trainer)
            assert not hasattr(model, "_memscale_executor")
    plain, ours = Record(), Record()
    plain.state(models[0])
    ours.state(models[1])
    assert_same(plain, ours)
    assert losses[:2] == losses[2:]
    if not bf16:  # with it, accelerate has put a forward of its own in both
        assert_as_never_wrapped(models[1], models[0])
    saved = [GPT2LMHeadModel.from_pretrained(tmp_path / str(w)) for w in (False, True)]
    assert_as_never_wrapped(saved[1].state_dict(), saved[0].state_dict())


def test_trainer_with_gradient_checkpointing(tmp_path: Path) -> None:
    records = []
    for wrapped in (False, True):
        options = {"gradient_checkpointing": True}
        trainer = trainer_of(make(gpt2), tmp_path / str(wrapped), **options)
        if wrapped:
            memscale.wrap(trainer, config_of())
        trainer.train()
        records.append(Record())
        records[-1].state(trainer.model)
    assert_same(*records)


def test_trainer_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    records = []
    for wrapped in (False, True):
        for resume in (False, True):
            trainer = trainer_of(make(gpt2), tmp_path / str(wrapped))
            trainer.args.save_strategy = "steps"
            trainer.args.save_steps = 2
            if wrapped:
                memscale.wrap(trainer, config_of())
            folder = tmp_path / str(wrapped) / "checkpoint-2"
            trainer.train(resume_from_checkpoint=str(folder) if resume else None)
        records.append(Record())
        records[-1].state(trainer.model)
    assert_same(*records)


def test_a_trainer_without_a_model_is_refused() -> None:
    class Trainerish:
        model = None

        def train(self) -> None:
            pass

    with pytest.raises(TypeError, match="target must be"):
        memscale.wrap(Trainerish())
