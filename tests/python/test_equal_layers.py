"""Which layers are alike, so that one is traced for many."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from memscale.model.equal_layers import equal_groups

WIDTH = 8


class Block(nn.Module):
    """It is only compared, never called."""

    def __init__(self, index: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(dropout)


def test_equal() -> None:
    assert equal_groups([Block(i) for i in range(4)]) == [[0, 1, 2, 3]]


def test_an_integer_may_count() -> None:
    layers = [Block(i) for i in range(3)]
    layers[2].index = 7
    assert equal_groups(layers) == [[0, 1], [2]]


def test_a_setting_counts() -> None:
    layers = [Block(i, dropout=0.1 * (i % 2)) for i in range(4)]
    assert equal_groups(layers) == [[0, 2], [1, 3]]


def test_a_shape_counts() -> None:
    layers = [Block(i) for i in range(3)]
    layers[1].up = nn.Linear(WIDTH, 64, bias=False)
    assert equal_groups(layers) == [[0, 2], [1]]


def test_a_mode_counts() -> None:
    layers = [Block(i) for i in range(3)]
    layers[1].dropout.eval()
    assert equal_groups(layers) == [[0, 2], [1]]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    """They hold their weights in lists, and references to them."""
    layers: list[nn.Module] = [kind(8, 8), kind(8, 8), kind(8, 8, bias=False)]
    assert equal_groups(layers) == [[0, 1], [2]]


def test_arrays_cannot_be_compared() -> None:
    layers = [Block(i) for i in range(2)]
    for layer in layers:
        layer.table = [np.arange(3)]
    assert equal_groups(layers) == [[0], [1]]


def test_hooks_and_shared_parameters_exclude() -> None:
    layers = [Block(i) for i in range(5)]
    layers[1].down.register_forward_hook(lambda *args: None)
    layers[3].up.weight = layers[2].up.weight
    assert equal_groups(layers) == [[0, 4]]
