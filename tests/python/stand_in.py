"""An executor in Python, right or wrong, and a model for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memscale.model.layers import find_layers


class StandIn:
    """An executor in Python that keeps saves on the host, and may be told to be wrong.

    ``wrong``: the layer whose saves come back a little off. ``in_forward`` is called
    in wrapped steps only.
    """

    def __init__(
        self,
        model: nn.Module,
        wrong: str | None = None,
        off: float = 1e-3,
        in_forward: Callable[[], object] | None = None,
    ) -> None:
        self.wrong, self.off, self.in_forward = wrong, off, in_forward
        self.on = True
        self.raises = False  # instead of being a little off
        self.dropped = 0
        self._layers = [""]
        self._hooks: saved_tensors_hooks | None = None
        model.register_forward_pre_hook(self._begin)
        for name, module in find_layers(model).modules.items():
            module.register_forward_pre_hook(
                lambda _, args, name=name: self._layers.append(name)
            )
            module.register_forward_hook(self._leave, always_call=True)
        model.register_forward_hook(self._end, always_call=True)
        model._memscale_executor = self

    def _begin(self, model: nn.Module, args: Any) -> None:
        if self.on:
            if self.in_forward is not None:
                self.in_forward()
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def __deepcopy__(self, memo: Any) -> StandIn:
        return self  # a copy of the model is traced with the hooks of the original

    def _leave(self, *_: Any) -> None:
        self._layers.pop()

    def _end(self, *_: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor, torch.device]:
        self.dropped += 1
        return self._layers[-1], tensor.cpu(), tensor.device

    def _unpack(self, packed: tuple[str, torch.Tensor, torch.device]) -> torch.Tensor:
        layer, there, device = packed
        tensor = there.to(device)
        if layer == self.wrong and self.raises:
            raise RuntimeError(f"a save of {layer} is lost")
        if layer == self.wrong and tensor.is_floating_point():
            return tensor + self.off
        return tensor

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(saves_dropped=self.dropped, bytes_dropped=0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks, and layers outside of them; two use the same tensor."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.batch_norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        x = torch.sin(x)
        out: torch.Tensor = self.head(
            torch.tanh(self.left(x)) * self.right(x).sigmoid()
        )
        return out


LAYERS = ["stem", "batch_norm", "blocks.0", "blocks.2", "left", "right", "head"]


def net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(size: int = 8, width: int = 16) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(5))
