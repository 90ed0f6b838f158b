"""What random programs do beside ordinary ops: Functions, modes, ops of others.

Custom autograd Functions as people write them, dispatch modes that change results,
an op whose schema does not say that it writes, and a collective.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

# torch's own type of ``ctx`` knows neither attributes nor saved tensors.
Context = Any


class Square(Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient


class CappedExponential(Function):
    """Saves its result beside its input."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        y = x.clamp(max=2).exp()
        ctx.save_for_backward(y, x)
        return y

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        y, x = ctx.saved_tensors
        return gradient * y * (x < 2)


class ReturnsItsInput(Function):
    """As some do that only change the gradient."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 0.5


class Doubles(Function):
    """Writes its input, and says so."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class ReusesItsSave(Function):
    """Backward writes what forward saved for it alone, and eager allows that."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        slope = x.detach().cos()
        ctx.save_for_backward(slope)
        return x.sin()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        slope = ctx.saved_tensors[0].clone()
        return slope.mul_(gradient)


class OverwritesUnseen(Function):
    """A kernel that torch does not know caps its input in place; that is saved."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        values = x.detach().numpy()
        values *= 0.5
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        x = ctx.saved_tensors[0]
        return gradient * (1 - x.tanh().square()) * 0.5


class OverwritesInList(Function):
    """The same kernel on tensors that it is given in a list."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, others: list[Tensor]) -> Tensor:
        for other in others:
            values = other.detach().numpy()
            values *= 0.5
        return x * 1.5

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * 1.5, None


class OverwritesInBackward(Function):
    """That kernel in backward, on what was saved."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        x = ctx.saved_tensors[0]
        result = gradient * x.cos()
        values = x.detach().numpy()
        values *= 0.5
        return result


class UnseenSlope(Function):
    """A kernel that torch does not know makes the result and what is saved."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        y, slope = torch.zeros_like(x), torch.empty_like(x)
        y.numpy()[:] = x.detach().sin().numpy()
        slope.numpy()[:] = x.detach().cos().numpy()
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


class TaggedWeight(Function):
    """Saves a parameter, and backward reads what somebody has put on it."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Context, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        scale: float = weight.tag
        return gradient @ weight * scale, gradient.t() @ x


class Rounds(TorchDispatchMode):
    """Results of some ops are rounded, as a simulation of other hardware does."""

    OPS = frozenset({"tanh", "sin", "mul", "addmm", "native_layer_norm", "sigmoid"})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in self.OPS:
            return out
        return pytree.tree_map_only(Tensor, _rounded, out)


def _rounded(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    return tensor.bfloat16().float()


# Its schema has no "(a!)": torch does not know that it writes.
_library = torch.library.Library("memscale_random", "DEF")
_library.define("halve(Tensor x) -> ()")


def _halve(x: Tensor) -> None:
    values = x.detach().numpy()
    values *= 0.5


_library.impl("halve", _halve, "CompositeExplicitAutograd")


def halve(x: Tensor) -> None:
    torch.ops.memscale_random.halve(x.detach())


def gather(into: Tensor, x: Tensor) -> None:
    """By a group of one process; the schema says nothing of a write, either."""
    _make_group()
    dist.all_gather_into_tensor(into.detach(), x.detach().contiguous())


def reduce(x: Tensor) -> None:
    _make_group()
    dist.all_reduce(x.detach())


def _make_group() -> None:
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
