"""Adapters on frozen bases: peft, and bases that are quantised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import memscale
from compat_huggingface import fine_tune, gpt2, llama, tokens
from compat_twins import (
    STEPS,
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


def lora(model: nn.Module) -> nn.Module:
    config = LoraConfig(
        r=4,
        lora_dropout=0.1,
        target_modules=["c_attn", "q_proj", "v_proj"],
        init_lora_weights="gaussian",
    )
    torch.manual_seed(5)
    adapted: nn.Module = get_peft_model(model, config)
    # Not zero, so that the first step's gradients reach both factors.
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted


@each_mode
@pytest.mark.parametrize("base", [gpt2, llama])
def test_lora_on_a_frozen_base(mode: Mode, base: Any) -> None:
    executor = check_twins(fine_tune, mode, lambda: lora(base()))
    assert len(executor.plans) == 1


def test_every_adapter_gets_its_gradient() -> None:
    """What checkpointing is known to lose, without a word, when inputs are frozen."""
    model = memscale.wrap(lora(make(gpt2)), config_of(Mode.AGGRESSIVE))
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 4
    assert all(p.grad is not None and p.grad.any() for p in trained)


@each_mode
def test_lora_added_after_wrap(mode: Mode) -> None:
    """The base stays wrapped, and its layers recompute with their adapters."""
    plain, ours = make(gpt2), make(gpt2)
    memscale.wrap(ours, config_of(mode))
    executor = executor_of(ours)
    assert_same(run(fine_tune, lora(plain)), run(fine_tune, lora(ours)))
    assert executor.stats().saves_dropped > 0
    memscale.detach(ours)
    assert_as_never_wrapped(ours, plain)


class Int8Linear(nn.Module):
    """A weight in int8 with a scale for each row, made floating at each use."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        scale = source.weight.detach().abs().amax(1, keepdim=True) / 127
        quantised = (source.weight.detach() / scale).round().to(torch.int8)
        self.register_buffer("weight", quantised)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))


@each_mode
def test_adapters_on_an_int8_base(mode: Mode) -> None:
    """As QLoRA: frozen integer weights, made floating in forward."""

    def build() -> nn.Module:
        model = llama().requires_grad_(False)
        for layer in model.model.layers:
            attention = layer.self_attn
            for name in ("q_proj", "v_proj"):
                base = Int8Linear(getattr(attention, name))
                setattr(attention, name, Adapted(base))
        return model

    check_twins(fine_tune, mode, build)


class Int8Weight(torch.Tensor):
    """A tensor subclass that dequantises itself where an op reads it."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Int8Weight:
        made: Int8Weight = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=scale.dtype, device=values.device
        )
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __repr__(self) -> str:
        return f"Int8Weight({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        floating = torch.utils._pytree.tree_map_only(
            cls, lambda t: t.values.to(t.scale.dtype) * t.scale, (args, kwargs or {})
        )
        return func(*floating[0], **floating[1])


@each_mode
def test_peft_over_a_quantised_tensor_subclass(mode: Mode) -> None:
    def build() -> nn.Module:
        model = llama().requires_grad_(False)
        for layer in model.model.layers:
            for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj):
                weight = linear.weight.detach()
                scale = weight.abs().amax(1, keepdim=True) / 127
                values = (weight / scale).round().to(torch.int8)
                quantised = Int8Weight(values, scale)
                linear.weight = nn.Parameter(quantised, requires_grad=False)
        return lora(model)

    def drive(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.1
        )
        for step in range(STEPS):
            ids = tokens(step)
            loss = model(input_ids=ids, labels=ids).loss
            record("loss", loss)
            loss.backward()
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    record(name, parameter.grad)
            optimizer.step()
            optimizer.zero_grad()

    plain, ours = make(build), make(build)
    memscale.wrap(ours, config_of(mode))
    records = []
    for model in (plain, ours):
        torch.manual_seed(7)
        records.append(Record())
        drive(model, records[-1])
    assert_same(*records)
    assert executor_of(ours).stats().saves_dropped > 0
