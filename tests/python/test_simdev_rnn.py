"""Recurrent layers on the simulated device: fused layer, fused cells, packed input."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn


def test_packed_sequences(sim: torch.device) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 8, batch_first=True)
    x, lengths = torch.randn(3, 5, 4), torch.tensor([5, 3, 2])

    def run(device: torch.device | str) -> torch.Tensor:
        layer.to(device)
        packed = rnn.pack_padded_sequence(x.to(device), lengths, batch_first=True)
        out, _ = rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
        return out.detach().cpu()

    torch.testing.assert_close(run("cpu"), run(sim))


@pytest.mark.parametrize("projection", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_lstm_variants(
    projection: int, dtype: torch.dtype, bias: bool, sim: torch.device
) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 8, 2, proj_size=projection, bias=bias, bidirectional=True)
    layer.to(dtype)
    x = torch.randn(5, 3, 4, dtype=dtype)

    def run(device: torch.device | str) -> list[torch.Tensor]:
        layer.to(device).zero_grad()
        out, (h, c) = layer(x.to(device))
        (out.sum() + h.sum() + c.sum()).backward()
        # Module.to() moves gradients in place: keep copies.
        gradients = [p.grad.detach().cpu().clone() for p in layer.parameters()]
        return [out.detach().cpu(), *gradients]

    for a, b in zip(run("cpu"), run(sim), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_cells_have_right_gradients(
    kind: type[nn.RNNCellBase], bias: bool, sim: torch.device
) -> None:
    torch.manual_seed(0)
    cell = kind(3, 4, bias=bias).to(sim, torch.float64)
    x, h, c = (torch.randn(2, n).to(sim, torch.float64) for n in (3, 4, 4))
    parameters = list(cell.parameters())

    def run(
        x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, *_: torch.Tensor
    ) -> object:
        return cell(x, (h, c) if kind is nn.LSTMCell else h)

    inputs = [t.requires_grad_() for t in (x, h, c)]
    assert torch.autograd.gradcheck(run, (*inputs, *parameters))


def test_too_few_weights_are_refused(sim: torch.device) -> None:
    state, x = (torch.zeros(n, 1, 4, device=sim) for n in (2, 3))
    weight, bias = torch.zeros(16, 4, device=sim), torch.zeros(16, device=sim)
    weights = [weight, weight, bias, bias]  # of one layer, where two are named
    with pytest.raises(RuntimeError, match="weights"):
        torch.lstm(x, [state, state], weights, True, 2, 0.0, True, False, False)
