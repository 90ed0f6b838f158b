"""Which calls are alike; and the walk over a model that every call takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from memscale._C import CallKind, trained_parameters
from memscale.model.call_kind import call_kind
from memscale.model.inputs import Call


class _Shared(nn.Module):
    """A module twice, a parameter twice, and places that are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.first = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        self.again = self.first[0]
        self.last = nn.Linear(2, 2).requires_grad_(False)
        self.last.weight = self.first[0].weight
        self.register_parameter("none", None)
        self.register_module("nothing", None)
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(3)])
        self.listed[1].requires_grad_(False)


def _frozen_gpt2() -> nn.Module:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64))
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 > 0)
    return model


MODELS = {
    "shared": _Shared,
    "gpt2": _frozen_gpt2,
    "none": nn.ReLU,
    "lstm": lambda: nn.LSTM(4, 4, 2),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_trained_parameters(name: str) -> None:
    model = MODELS[name]()
    for i, module in enumerate(model.modules()):
        module.training = i % 3 > 0
    expected = ""
    seen = set()
    for module in model.modules():
        expected += "et"[module.training]
        own = [p for p in module.parameters(recurse=False) if p not in seen]
        expected += "".join("01"[p.requires_grad] for p in own)
        seen.update(own)
    assert trained_parameters(model) == expected


def test_a_module_that_holds_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model._modules["self"] = model
    assert trained_parameters(model) == "tt11"


def test_what_makes_calls_differ() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def kind(rows: int = 2) -> CallKind:
        return call_kind(model, Call((torch.ones(rows, 4),), {}, source="a test"))

    before = kind()
    assert kind(3).covers(before)
    assert not before.covers(kind(3))
    model[1].weight.requires_grad_(False)
    frozen = kind()
    assert not frozen.covers(before)
    model[1].eval()
    in_part = kind()
    assert not in_part.covers(frozen)
    model.eval()
    assert not kind().covers(in_part)


def test_how_arguments_are_arranged_makes_calls_differ() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    calls = [
        Call((x, x), {}),
        Call((x,), {"input": x}),
        Call((x,), {"other": x}),
        Call((), {"input": x, "other": x}),
        Call(((x, x),), {}),
        Call(([x, x],), {}),
        Call((x, None), {}),
        Call((x, 1), {}),
        Call((x, True), {}),
        Call((x, 1.0), {}),
        Call((x, "1"), {}),
        Call((x, nn.Parameter(x)), {}),
    ]
    kinds = [call_kind(model, call) for call in calls]
    for i, kind in enumerate(kinds):
        assert [kind.covers(other) for other in kinds] == [
            i == j for j in range(len(kinds))
        ]
