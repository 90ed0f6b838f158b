"""verify_correctness leaves everything as it was; and when wrap calls it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.verify import FirstBatchCheck, VerifyError, verify_at_wrap
from memscale.verify import verify_correctness as verify
from stand_in import Net, StandIn, batch, net

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


# ---- as it was ----


class Stateful(nn.Module):
    """Everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16, max_norm=0.5)
        self.net = Net()
        self.target = nn.Linear(16, 16).requires_grad_(False)
        self.generator = torch.Generator().manual_seed(9)
        self.calls = 0
        self.seen: list[int] = []
        self.average = torch.zeros(16)
        self.register_buffer("swapped", torch.zeros(3))
        self.fails = ""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.extra = self.calls
        self.swapped = self.swapped + 1
        self.target.weight.data.mul_(0.5)
        self.target.bias.data = self.target.bias.data + 1
        x = self.embedding(ids)
        x = x + torch.rand(16, generator=self.generator).to(x.device)
        x = x + random.random() + torch.rand(16, device=x.device)
        self.average.mul_(0.9).add_(x.detach().mean(0).cpu())
        out = self.net(x) + self.target(x).sum()
        if self.fails == "forward" or (
            self.fails == "wrapped" and self._memscale_executor.on
        ):
            raise KeyError("as told")
        if self.fails == "backward":
            out.register_hook(lambda gradient: 1 / 0)
        return out


def picture(model: Stateful) -> dict[str, Any]:
    """Everything that must be the same afterwards; tensors as their bytes."""

    def bits(tensor: torch.Tensor) -> list[Any]:
        return [
            id(tensor),
            tensor.data_ptr(),
            tensor.detach().cpu().flatten().view(torch.uint8).tolist(),
        ]

    taken: dict[str, Any] = {
        n: bits(t) for n, t in model.state_dict(keep_vars=True).items()
    }
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        taken[f"{name}.grad"] = None if gradient is None else bits(gradient)
        hooks = parameter._post_accumulate_grad_hooks
        taken[f"{name}.hooks"] = None if hooks is None else list(hooks.items())
    taken["modes"] = [module.training for module in model.modules()]
    taken["keys"] = [sorted(vars(module)) for module in model.modules()]
    taken["hooks"] = [
        [list(m._forward_hooks), list(m._forward_pre_hooks)] for m in model.modules()
    ]
    taken["plain"] = (model.calls, list(model.seen), bits(model.average))
    taken["generator"] = model.generator.get_state().tolist()
    taken["random"] = (
        random.getstate(),
        torch.get_rng_state().tolist(),
        torch.sim.get_rng_state().tolist(),
    )
    return taken


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("fails", ["", "forward", "wrapped", "backward"])
def test_everything_is_as_it_was(fails: str, device: str) -> None:
    torch.manual_seed(2)
    model = Stateful().to(device)
    StandIn(model)
    ids = torch.randint(12, (8,), device=device)
    for _ in range(2):  # gradients and statistics of a training that is under way
        model(ids).square().mean().backward()
    stepped: list[str] = []
    model.net.head.weight.register_post_accumulate_grad_hook(
        lambda parameter: stepped.append("optimizer in backward")
    )
    model.net.batch_norm.eval()
    model.fails = fails
    before = picture(model)
    if fails in ("forward", "backward"):
        with pytest.raises((KeyError, ZeroDivisionError)) as error:
            verify(model, ids)
        assert any("the plain model" in note for note in error.value.__notes__)
    else:
        report = verify(model, ids)
        assert report.passed == (fails == "")
        if fails:
            assert report.error == "KeyError: 'as told'"
    assert picture(model) == before
    assert stepped == []


def test_numpy_and_inputs_are_as_they_were() -> None:
    numpy = pytest.importorskip("numpy")

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(float(numpy.random.rand()))
            out: torch.Tensor = self.linear(x)
            return out

    model, x = Writes(), batch()
    StandIn(model)
    state = numpy.random.get_state()[1].tolist()
    report = verify(model, x)
    assert report.passed, report
    assert torch.equal(x, batch())
    assert numpy.random.get_state()[1].tolist() == state


def test_what_verify_attaches_it_detaches() -> None:
    torch.manual_seed(2)
    model = Stateful()
    before = picture(model)
    report = verify(
        model, torch.randint(12, (8,), generator=model.generator), policy="cheap"
    )
    model.generator.manual_seed(9)
    assert report.passed, report
    assert picture(model) == before
    model.fails = "forward"
    before = picture(model)
    with pytest.raises(KeyError):
        verify(model, torch.zeros(8, dtype=torch.long), policy="cheap")
    assert picture(model) == before


def test_eval_model_is_verified_in_training() -> None:
    model = net().eval()
    StandIn(model)
    report = verify(model, batch())
    assert report.passed
    assert not any(module.training for module in model.modules())
    assert report.num_compared == len(model.state_dict()) + 4


# ---- Config(verify_correctness=True) ----


def test_at_wrap_with_a_sample(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    executor = StandIn(model)
    with caplog.at_level("INFO", "memscale"):
        assert verify_at_wrap(model, executor, batch()) is None
    assert "bit for bit" in caplog.text
    executor.wrong = "blocks.1"
    with pytest.raises(VerifyError, match=r"blocks\.1"):
        verify_at_wrap(model, executor, batch())


def test_at_the_first_batch() -> None:
    model = net()
    executor = StandIn(model)
    hooks = list(model._forward_pre_hooks)
    check = verify_at_wrap(model, executor)
    assert isinstance(check, FirstBatchCheck)
    with torch.no_grad():
        model(batch())
    model.eval()(batch())
    memscale.estimate(model, batch(), None)  # traces a copy, with the same hooks
    assert not check.done
    torch.manual_seed(8)
    output = model.train()(batch())
    assert check.done
    assert check.report is not None
    assert check.report.passed
    assert list(model._forward_pre_hooks) == hooks
    # As if nothing had been verified: the same dropout, each batch seen once.
    plain = net()
    with torch.no_grad():
        plain(batch())
    torch.manual_seed(8)
    assert torch.equal(plain(batch()), output)
    assert torch.equal(plain.batch_norm.running_var, model.batch_norm.running_var)


def test_first_batch_of_a_wrong_model_raises() -> None:
    model = net()
    executor = StandIn(model, wrong="left")
    verify_at_wrap(model, executor)
    with pytest.raises(VerifyError, match="first differing layer: left"):
        model(batch())
    assert int(model.batch_norm.num_batches_tracked) == 0
    model(batch())  # said once


def test_check_can_be_cancelled() -> None:
    model = net()
    executor = StandIn(model, wrong="left")
    check = verify_at_wrap(model, executor)
    assert check is not None
    check.cancel()
    model(batch())
    assert check.report is None
    assert check.done


def test_config_field() -> None:
    model = net()
    memscale.wrap(model, memscale.Config(verify_correctness=True), batch())
    memscale.detach(model)
    memscale.wrap(model, memscale.Config(verify_correctness=True))
    model(batch()).sum().backward()
    assert int(model.batch_norm.num_batches_tracked) == 1
    memscale.detach(model)
    assert not model._forward_pre_hooks
