"""An estimate from the user's own first step, which must not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch.nn import functional as F

import memscale
import models
from memscale.benchmarks.measure import measure_peak

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

Loop = Callable[[nn.Module, torch.optim.Optimizer, tuple], torch.Tensor]


def own_loss(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple
) -> torch.Tensor:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def loss_in_the_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple
) -> torch.Tensor:
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        )
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.norm(self.blocks(x))))


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 32), torch.randint(8, (16,))


def hooks_of(model: nn.Module) -> list[Any]:
    """Everything that could have been left behind."""
    return [
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        *(
            {
                name: value if isinstance(value, bool) else len(value)
                for name, value in vars(module).items()
                if "hooks" in name
            }
            for module in model.modules()
        ),
        *("forward" in vars(module) for module in model.modules()),
    ]


def run(
    model: nn.Module, batch: tuple, loop: Loop, steps: int = 3
) -> list[torch.Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [loop(model, optimizer, batch) for _ in range(steps)]


def assert_same_training(
    model: nn.Module,
    twin: nn.Module,
    losses: list[torch.Tensor],
    twin_losses: list[torch.Tensor],
) -> None:
    for a, b in zip(losses, twin_losses, strict=True):
        assert torch.equal(a, b)
    ours, theirs = model.state_dict(), twin.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("device", ["cpu", "sim"])
class TestTraining:
    def test_with_the_models_own_loss(self, device: str) -> None:
        model = models.cnn().to(device)
        batch = tuple(t.to(device) for t in models.images())
        twin = copy.deepcopy(model)
        before = hooks_of(model)
        first = memscale.estimate_at_first_step(model)
        assert first.estimate is None
        assert not first.done
        losses = run(model, batch, own_loss)
        assert first.done
        assert hooks_of(model) == before
        assert_same_training(model, twin, losses, run(twin, batch, own_loss))
        assert first.estimate.method == "static"
        assert first.estimate.loss == "the model's own"
        assert first.estimate.inputs == "the first batch"
        fresh = memscale.estimate(twin, batch)
        assert first.estimate.peak_bytes == fresh.peak_bytes

    def test_with_a_loss_in_the_loop(self, device: str) -> None:
        model = Classifier().to(device)
        batch = tuple(t.to(device) for t in labelled())
        twin = copy.deepcopy(model)
        original = copy.deepcopy(model)
        before = hooks_of(model)
        first = memscale.estimate_at_first_step(model)
        losses = run(model, batch, loss_in_the_loop)
        assert first.done
        assert hooks_of(model) == before
        assert_same_training(model, twin, losses, run(twin, batch, loss_in_the_loop))
        seen = first.estimate
        assert seen.method == "recorded"
        assert seen.loss == "computed in your loop"
        assert "aten::nll_loss_forward" in {
            seen.trace[i].name for i in range(len(seen.trace))
        }
        assert set(seen.phases) == {"forward", "backward", "optimizer"}

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = original

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return F.cross_entropy(self.body(x), y)

        measured = measure_peak(Whole(), batch, None, torch.optim.AdamW, device)
        assert abs(seen.peak_bytes - measured) <= max(measured // 100, 4096)

    def test_without_an_optimizer(self, device: str) -> None:
        model = Classifier().to(device)
        x, y = (t.to(device) for t in labelled())
        twin = copy.deepcopy(model)
        before = hooks_of(model)
        first = memscale.estimate_at_first_step(model, optimizer=None)

        def gradients(trained: nn.Module) -> list[torch.Tensor]:
            torch.manual_seed(3)
            for _ in range(2):  # they accumulate
                F.cross_entropy(trained(x), y).backward()
            return [p.grad for p in trained.parameters()]

        for a, b in zip(gradients(model), gradients(twin), strict=True):
            assert torch.equal(a, b)
        # The second forward ends what no optimizer's step did.
        assert first.done
        assert hooks_of(model) == before
        assert first.estimate.method == "recorded"
        assert set(first.estimate.phases) == {"forward", "backward"}


def test_the_prediction_is_there_before_the_first_step_is_over() -> None:
    model, (x, y) = Classifier(), labelled()
    first = memscale.estimate_at_first_step(model)
    output = model(x)
    predicted = first.estimate
    assert predicted.method == "static"
    assert not first.done
    F.cross_entropy(output, y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert first.done
    assert first.estimate.method == "recorded"


def test_evaluation_is_not_a_step() -> None:
    model, (x, _) = Classifier(), labelled()
    first = memscale.estimate_at_first_step(model)
    model.eval()
    model(x)
    model.train()
    with torch.no_grad():
        model(x)
    assert first.estimate is None
    assert not first.done
    losses = run(model, labelled(), loss_in_the_loop, steps=1)
    assert first.done
    assert len(losses) == 1


def test_another_optimizer_does_not_end_the_step() -> None:
    model, other = Classifier(), nn.Linear(2, 2)
    x, y = labelled()
    first = memscale.estimate_at_first_step(model)
    F.cross_entropy(model(x), y).backward()
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert not first.done
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert first.done


def test_cancel_before_the_first_step() -> None:
    model = Classifier()
    before = hooks_of(model)
    first = memscale.estimate_at_first_step(model)
    assert hooks_of(model) != before
    first.cancel()
    assert first.done
    assert hooks_of(model) == before
    run(model, labelled(), loss_in_the_loop, steps=1)
    assert first.estimate is None


def test_cancel_in_the_middle() -> None:
    model, (x, y) = Classifier(), labelled()
    twin = copy.deepcopy(model)
    before = hooks_of(model)
    first = memscale.estimate_at_first_step(model)
    torch.manual_seed(3)
    output = model(x)
    first.cancel()
    assert first.done
    assert hooks_of(model) == before
    F.cross_entropy(output, y).backward()
    torch.manual_seed(3)
    F.cross_entropy(twin(x), y).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert first.estimate.method == "static"  # the prediction stays
    first.cancel()  # once more does no harm


def test_values_that_decide_are_recorded_as_they_come() -> None:
    class Decides(Classifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * 2 if y.sum() > 0 else y

    model = Decides()
    twin = copy.deepcopy(model)
    batch = labelled()
    first = memscale.estimate_at_first_step(model)
    losses = run(model, batch, loss_in_the_loop)
    assert_same_training(model, twin, losses, run(twin, batch, loss_in_the_loop))
    assert first.estimate.method == "recorded"


def test_a_model_that_fails_leaves_no_hooks() -> None:
    model = Classifier()
    before = hooks_of(model)
    first = memscale.estimate_at_first_step(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(16, 31))
    first.cancel()
    assert hooks_of(model) == before
    run(model, labelled(), loss_in_the_loop, steps=1)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        memscale.estimate_at_first_step("model")
    with pytest.raises(memscale.InputError, match="adamx"):
        memscale.estimate_at_first_step(Classifier(), optimizer="adamx")
