"""Random programs over a pool of tensors, as a model of three layers.

A program is drawn once from its seed and then run plain and attached. Its layers
share the pool: what one makes, the next may read, view or write in place. Many
programs are wrong, and eager says so; then so must we.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replay_cases import ROWS, WIDTH, Step

Instruction = tuple[str, int, int, float]

PURE: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "sin": lambda a, b, c: a.sin(),
    "cos": lambda a, b, c: a.cos(),
    "tanh": lambda a, b, c: a.tanh(),
    "sigmoid": lambda a, b, c: a.sigmoid(),
    "relu": lambda a, b, c: a.relu(),
    "silu": lambda a, b, c: F.silu(a),
    "softmax": lambda a, b, c: a.softmax(-1),
    "layer_norm": lambda a, b, c: F.layer_norm(a, a.shape[-1:]),
    "scale": lambda a, b, c: a * c,
    "shift": lambda a, b, c: a + c,
    "add": lambda a, b, c: a + b,
    "subtract": lambda a, b, c: a.sub(b, alpha=2),
    "multiply": lambda a, b, c: a * b.tanh(),
    "product": lambda a, b, c: a.tanh() * b.sin(),
    "maximum": lambda a, b, c: torch.maximum(a, b),
    "where": lambda a, b, c: torch.where(a > 0, a, b),
    "clone": lambda a, b, c: a.clone(),
    "contiguous": lambda a, b, c: a.contiguous(),
    "detached": lambda a, b, c: a.detach(),
    "detached_copy": lambda a, b, c: a.detach() * c,
    "dropout": lambda a, b, c: F.dropout(a, 0.3),
    "noise": lambda a, b, c: a + torch.rand_like(a),
    "ones": lambda a, b, c: torch.ones_like(a) * c,
    "zeros": lambda a, b, c: torch.zeros_like(a),
    "normalised": lambda a, b, c: a / (a.detach().abs().mean() + 1),
    "sorted": lambda a, b, c: a.sort(1).values,
    "stacked": lambda a, b, c: torch.stack([a, b]).mean(0),
    "joined": lambda a, b, c: torch.cat([a[:, :4], b[:, 4:]], 1),
    "mixed": lambda a, b, c: (a @ b.t()).tanh() @ b,
    "rolled": lambda a, b, c: a.roll(1, 0),
}

# A view of the same shape, or a part, which has to be made whole to be used.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "same": lambda a: a.view(-1).view(ROWS, WIDTH) if a.is_contiguous() else a[:],
    "turned": lambda a: a.t().t(),
    "detached": lambda a: a.detach(),
    "first_rows": lambda a: a[:2],
    "some_columns": lambda a: a[:, 1:6:2],
    "one_row": lambda a: a[3],
    "right": lambda a: a[:, 4:],
    "narrowed": lambda a: a.narrow(0, 1, 3).t(),
    "diagonal": lambda a: a.diagonal(),
}

WRITES: dict[str, Callable[[Tensor, Tensor, float], object]] = {
    "scale": lambda a, b, c: a.mul_(c),
    "shift": lambda a, b, c: a.add_(c),
    "tanh": lambda a, b, c: a.tanh_(),
    "sigmoid": lambda a, b, c: a.sigmoid_(),
    "relu": lambda a, b, c: a.relu_(),
    "clamp": lambda a, b, c: a.clamp_(-c, c),
    "add": lambda a, b, c: a.add_(b.mean()),
    "multiply": lambda a, b, c: a.mul_(b.mean().tanh()),
    "copy": lambda a, b, c: a.copy_(b.mean().expand_as(a)),
    "zero": lambda a, b, c: a.zero_(),
    "fill": lambda a, b, c: a.fill_(c),
    "masked": lambda a, b, c: a.masked_fill_(a.detach() > 0, c),
    "dropout": lambda a, b, c: F.dropout(a, 0.3, inplace=True),
    "silu": lambda a, b, c: F.silu(a, inplace=True),
    "indexed": lambda a, b, c: a.index_fill_(0, a.new_tensor([0, 1]).long(), c),
    "assigned": lambda a, b, c: a.__setitem__(slice(0, 1), c),
}


def draw(seed: int, length: int) -> list[Instruction]:
    """Mostly reads: with too many writes, eager would accept no program."""
    rng = random.Random(seed)
    kinds = {
        **{f"pure {name}": 1.0 for name in PURE},
        **{f"view {name}": 0.5 for name in VIEWS},
        **{f"write {name}": 0.35 for name in WRITES},
        "linear": 3.0,
        "without gradient": 1.5,
        "buffer read": 0.7,
        "buffer write": 0.4,
        "unknown": 0.5,
    }
    names, weights = list(kinds), list(kinds.values())
    return [
        (
            rng.choices(names, weights)[0],
            rng.randrange(1000),
            rng.randrange(1000),
            round(rng.uniform(0.3, 1.4), 2),
        )
        for _ in range(length)
    ]


class Pool:
    """Tensors of one shape, and views of them that may be written, too."""

    def __init__(self, x: Tensor) -> None:
        self.whole = [x]
        self.parts = [x]

    def pick(self, i: int) -> Tensor:
        """One of the last few: what is old is seldom used."""
        return self.whole[-1 - i % min(len(self.whole), 4)]

    def pick_to_write(self, i: int) -> Tensor:
        recent = self.whole[-3:] + self.parts[-3:]
        return recent[i % len(recent)]

    def add(self, tensor: Tensor) -> None:
        if tensor.shape == (ROWS, WIDTH):
            self.whole.append(tensor)
        else:
            self.parts.append(tensor)
            self.whole.append(self.pick(0) + tensor.mean())


class Part(nn.Module):
    """One layer: a piece of the program, with a matmul and a buffer of its own."""

    state: Tensor

    def __init__(self, program: list[Instruction]) -> None:
        super().__init__()
        self.program = program
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.rand(ROWS, WIDTH))

    def forward(self, x: Tensor, pool: Pool) -> Tensor:
        pool.whole.append(x)
        for instruction in self.program:
            self.run(instruction, pool)
        return pool.whole[-1] + 1

    def run(self, instruction: Instruction, pool: Pool) -> None:
        kind, i, j, c = instruction
        group, _, name = kind.partition(" ")
        a, b = pool.pick(i), pool.pick(j)
        if group == "pure":
            pool.add(PURE[name](a, b, c))
        elif group == "view":
            pool.add(VIEWS[name](a))
        elif group == "write":
            WRITES[name](pool.pick_to_write(i), b.detach() if j % 2 else b, c)
        elif kind == "linear":
            pool.add(self.linear(a))
        elif kind == "without gradient":
            with torch.no_grad():
                made = (a * c).sin().add_(b)
            pool.add(made)
        elif kind == "buffer read":
            pool.add(a * (self.state * c).sin())
        elif kind == "buffer write":
            with torch.no_grad():
                self.state.mul_(0.9).add_(a.detach(), alpha=0.1)
        else:
            scale = torch.empty_like(a)
            with torch.no_grad():
                scale[: 3 + i % 4] = c
                scale[3:].copy_(b[3:])
            pool.add(a * scale[:1] + scale[3:].mean())


class Program(nn.Module):
    """Three layers with a pool between them; gives the loss."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        program = draw(seed, length)
        third = length // 3
        cuts = [program[:third], program[third : 2 * third], program[2 * third :]]
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Part(cut) for cut in cuts)
        self.pool: Pool

    def forward(self, x: Tensor) -> Tensor:
        self.pool = Pool(x * 1)
        h = self.stem(x)
        for part in self.parts:
            h = part(h, self.pool)
        total = h.tanh().square().mean()
        for tensor in self.pool.whole[:: max(1, len(self.pool.whole) // 5)]:
            total = total + tensor.sin().mean()
        return total


def program_step(seed: int) -> Step:
    """A step after whose forward some of the pool may be changed by the caller."""
    rng = random.Random(seed)
    changed, which = rng.random() < 0.3, rng.randrange(6)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Program)
        loss: Tensor = model(x)
        if changed:
            with torch.no_grad():
                model.pool.pick_to_write(which).mul_(2)
        del model.pool
        loss.backward()
        return loss

    return run
