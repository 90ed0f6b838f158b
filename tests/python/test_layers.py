"""Which parts of a model are its layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
import models
from memscale.model.layers import find_layers

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for each in self.blocks:
            x = each(x)
        return self.head(x)


def test_a_member_of_a_list_is_a_layer_and_owns_what_is_in_it() -> None:
    layers = find_layers(Model())
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert list(layers.modules) == ["", "embedding", "blocks", *blocks, "head"]
    assert layers.blocks == set(blocks)
    assert layers.rows == [blocks]


def test_plain_modules_in_a_sequence_are_layers_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    layers = find_layers(model)
    assert list(layers.modules) == ["", "0", "1", "2"]
    assert layers.blocks == set()
    assert layers.rows == []


def test_blocks_without_parameters_are_looked_into() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Tanh()), block())
    layers = find_layers(model)
    assert list(layers.modules) == ["", "0", "0.0", "0.1", "1"]
    assert layers.blocks == {"1"}


def test_classes_make_rows_of_their_own() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

    model = nn.ModuleList([block(), Other(), block(), Other(), nn.Linear(4, 4)])
    layers = find_layers(model)
    assert layers.rows == [["0", "2"], ["1", "3"]]
    assert layers.blocks == {"0", "1", "2", "3"}


def test_lists_in_lists() -> None:
    model = nn.ModuleList(nn.ModuleList(block() for _ in range(2)) for _ in range(2))
    layers = find_layers(model)
    assert layers.rows == [["0", "1"]]
    assert set(layers.modules) == {"", "0", "1"}


def test_a_module_that_is_there_twice_is_one_layer() -> None:
    once = block()
    model = nn.Sequential(once, block(), once)
    layers = find_layers(model)
    assert list(layers.modules) == ["", "0", "1"]
    assert layers.rows == [["0", "1"]]


def test_every_parameter_has_one_owner() -> None:
    for make, _ in models.MODELS.values():
        model = make()
        layers = find_layers(model)
        owned = [
            id(parameter)
            for name, module in layers.modules.items()
            for parameter in module.parameters(recurse=name in layers.blocks)
        ]
        assert set(owned) == {id(parameter) for parameter in model.parameters()}


def test_names_are_those_of_the_trace() -> None:
    model = Model()
    e = memscale.estimate(model, torch.zeros(2, 3, dtype=torch.long), "adamw")
    assert e.trace.layers == list(find_layers(model).modules)
    last = len(e.timeline) - 1
    shares = {name: by_category for name, _, by_category in e.timeline.by_layer(last)}
    for i in range(3):
        size = (4 * 4 + 4) * 4
        assert shares[f"blocks.{i}"]["parameters"] == size
        assert shares[f"blocks.{i}"]["gradients"] == size
        assert shares[f"blocks.{i}"]["optimizer_state"] == 2 * (size + 4)
    assert shares["embedding"]["parameters"] == 8 * 4 * 4
