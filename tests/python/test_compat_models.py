"""What models do inside of their forward: under wrap, each the same, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memscale
from compat_twins import (
    WIDTH,
    Block,
    Net,
    batch,
    check_twins,
    config_of,
    each_mode,
    executor_of,
    make,
    steps,
    untouched_process,  # noqa: F401
)
from memscale import InputError
from memscale import OptimizationMode as Mode

# ---- sharing ----


@each_mode
def test_tied_weights(mode: Mode) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].up.weight = self.blocks[0].up.weight
            self.out = nn.Linear(WIDTH, WIDTH)
            self.out.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.out(x))

    check_twins(steps(), mode, Tied)


@each_mode
def test_reused_modules(mode: Mode) -> None:
    class Reused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.append(self.blocks[0])
            self.again = self.blocks[1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.again(self.again(x)))

    check_twins(steps(), mode, Reused)


# ---- checkpointing of the model's own ----


@each_mode
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_in_the_model(mode: Mode, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.statistics(self.first(x))
            for i, block in enumerate(self.blocks):
                if i % 2 == 0:
                    x = block(x)
                    continue
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    check_twins(steps(), mode, lambda: Checkpointed(3))


@each_mode
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_the_model(mode: Mode, reentrant: bool) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return checkpoint(model, x, use_reentrant=reentrant).square().mean()

    check_twins(steps(loss_of), mode, drops=None)


# ---- torch.func, functions and kernels ----


@each_mode
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "jacrev"])
def test_torch_func_in_a_layer(mode: Mode, transform: str) -> None:
    class Functional(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if transform == "vmap":
                x = x + torch.func.vmap(torch.sin)(x)
            elif transform == "grad":
                x = x + torch.func.grad(lambda t: t.sin().sum())(x)
            elif transform == "jvp":
                x = x + torch.func.jvp(torch.sin, (x,), (x,))[1]
            else:
                rows = x[:, :2]
                jacobian = torch.func.vmap(torch.func.jacrev(torch.sin))(rows)
                x = x + jacobian.sum((1, 2))[:, None]
            return super().forward(x)

    check_twins(steps(), mode, lambda: Net(block=Functional))


def test_torch_func_around_the_model() -> None:
    """Gradients of each sample, through functional_call."""
    plain, ours = make(), memscale.wrap(make(), config_of())
    results = []
    for model in (plain, ours):
        model.eval()
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers())

        def loss_of(p: Any, x: torch.Tensor, m: Any = model, b: Any = buffers) -> Any:
            return torch.func.functional_call(m, (p, b), (x[None],)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss_of), (None, 0))
        results.append(per_sample(parameters, batch(rows=4)))
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name
    assert executor_of(ours).plans == []


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        y = torch.tanh(x * factor)
        ctx.save_for_backward(y)
        ctx.factor = factor
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y) * ctx.factor, None


@each_mode
def test_autograd_function(mode: Mode) -> None:
    class WithFunction(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(_Scaled.apply(x, 0.7))

    check_twins(steps(), mode, lambda: Net(block=WithFunction))


class _InNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.from_numpy(np.cos(x.detach().numpy()))


@each_mode
def test_numpy_in_a_layer(mode: Mode) -> None:
    """An opaque kernel: it cannot be traced, and is planned after its first step."""

    class WithNumpy(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.from_numpy(x.detach().numpy() > 0).float()
            return super().forward(_InNumpy.apply(x) * mask)

    executor = check_twins(steps(), mode, lambda: Net(block=WithNumpy))
    assert executor.plan is not None
    assert executor.stats().calls_unlike_keep_set == 0


@torch.library.custom_op("memscale_compat::triple", mutates_args=())
def _triple(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * 3)


_triple.register_autograd(lambda ctx, gradient: gradient * 3)


@each_mode
def test_custom_op(mode: Mode) -> None:
    class WithOp(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.sigmoid(_triple(x)))

    executor = check_twins(steps(), mode, lambda: Net(block=WithOp))
    assert executor.plan is not None  # of its first step: it has no fake kernel
    assert executor.stats().calls_unlike_keep_set == 0


@each_mode
def test_data_dependent_control_flow(mode: Mode) -> None:
    class Branching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                x = torch.sigmoid(x)
            for _ in range(int(x.abs().mean() * 4)):
                x = x * 0.9
            x[x > 1.5] = 0.5
            return super().forward(x[x[:, 0].argsort()])

    executor = check_twins(steps(), mode, lambda: Net(block=Branching))
    assert executor.plan is not None


@each_mode
def test_parts_that_are_random(mode: Mode) -> None:
    """Layers left out at random (stochastic depth), with Python's random numbers."""
    import random

    class Stochastic(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                if random.random() < 0.7:
                    x = block(x)
            return self.head(x)

    def seeded(model: nn.Module, record: Any) -> None:
        random.seed(11)
        steps(count=6)(model, record)

    check_twins(seeded, mode, lambda: Stochastic(4))


@each_mode
def test_outputs_of_many_kinds(mode: Mode) -> None:
    class Many(Net):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return {"y": y, "parts": [y.sin(), (y.cos(), None)], "name": "many"}

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return out["y"].mean() + out["parts"][0].mean() + out["parts"][1][0].mean()

    check_twins(steps(loss_of), mode, Many)


@pytest.mark.parametrize("kind", ["nested", "sparse", "object", "none"])
def test_arguments_of_many_kinds(kind: str) -> None:
    class Flexible(Net):
        def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
            if kind == "nested":
                x = x + torch.nested.to_padded_tensor(other, 0.0).sum()
            elif kind == "sparse":
                x = x + torch.sparse.mm(other, x)
            elif kind == "object":
                x = x * other.factor
            return super().forward(x)

    class Factor:
        factor = 2.0

    others = {
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "sparse": torch.eye(320).to_sparse(),
        "object": Factor(),
        "none": None,
    }
    drive = steps(lambda m, x: m(x, others[kind]).square().mean())
    check_twins(drive, Mode.BALANCED, Flexible)


def test_lazy_modules() -> None:
    """Parameters that get their shapes in a first call: refused until then."""

    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.lazy(x))

    with pytest.raises(InputError, match=r"lazy.weight without a shape"):
        memscale.wrap(Lazy())

    def build() -> nn.Module:
        model = Lazy()
        model(batch())
        return model

    check_twins(steps(), Mode.AGGRESSIVE, build)


def test_recurrent_layers_on_sim(sim: torch.device) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(WIDTH, WIDTH, 2, dropout=0.1)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(F.gelu(self.cells(x.view(20, 16, WIDTH))[0]))

    check_twins(steps(device=sim), Mode.AGGRESSIVE, Recurrent, device=sim, drops=None)


def test_a_layer_called_alone() -> None:
    """A part of a wrapped model, called by itself, recomputes as well."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model.blocks[1](model.blocks[0](x)).square().mean()

    check_twins(steps(loss_of), Mode.AGGRESSIVE)


def test_a_model_that_trains_inside_of_another() -> None:
    """Both wrapped: the inner one's call belongs to the outer's."""
    plain_inner, inner = make(), memscale.wrap(make(), config_of(Mode.AGGRESSIVE))

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # Not a submodule: found through a closure, as a reward model may be.
        wrapped = hasattr(model, "_memscale_executor")
        return (model(x) + (inner if wrapped else plain_inner)(x)).square().mean()

    check_twins(steps(loss_of), Mode.BALANCED)
