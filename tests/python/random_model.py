"""A random program as a model: parts that share a pool of tensors.

What one part makes, the next may read, view or write in place. Many programs are
wrong, and eager says so; then so must we.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from random_steps import (
    FUNCTIONS,
    PURE,
    ROWS,
    UNSEEN_FUNCTIONS,
    VIEWS,
    WIDTH,
    WITHOUT_GRADIENT,
    WRITES,
)
from random_tricks import Rounds, TaggedWeight, gather, halve, reduce

# How often each kind is drawn. Mostly reads: with too many writes, eager would
# accept no program.
KINDS = {
    "pure": 8.0,
    "view": 2.5,
    "write": 1.2,
    "data_view": 0.4,
    "data_write": 0.6,
    "without_gradient": 1.0,
    "write_without_gradient": 0.7,
    "linear": 1.8,
    "batch_norm": 0.3,
    "buffer_read": 0.5,
    "buffer_write": 0.4,
    "parameter_write": 0.2,
    "unknown_memory": 0.4,
    "output": 0.3,
    "part": 0.6,
    "function": 0.8,
    "unseen_function": 0.3,
    "tagged_weight": 0.3,
    "mode": 0.2,
    "hidden_write": 0.4,
    "collective": 0.6,
}
# Not on a device whose memory numpy and gloo do not know.
ONLY_ON_CPU = {"unseen_function", "hidden_write", "collective"}

_NAMES: dict[str, list[str]] = {
    "pure": list(PURE),
    "view": list(VIEWS),
    "write": list(WRITES),
    "data_write": list(WRITES),
    "without_gradient": list(WITHOUT_GRADIENT),
    "write_without_gradient": list(WRITES),
    "function": list(FUNCTIONS),
    "unseen_function": list(UNSEEN_FUNCTIONS),
    "collective": ["gather", "reduce"],
}


@dataclass(frozen=True)
class Instruction:
    """One step: its kind and name, which tensors of the pool, and a number."""

    kind: str
    name: str
    i: int
    j: int
    c: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name}({self.i}, {self.j}, {self.c})"


def draw(rng: random.Random, length: int) -> list[Instruction]:
    kinds, weights = list(KINDS), list(KINDS.values())
    drawn = []
    for _ in range(length):
        kind = rng.choices(kinds, weights)[0]
        name = rng.choice(_NAMES.get(kind, [""]))
        i, j = rng.randrange(1000), rng.randrange(1000)
        drawn.append(Instruction(kind, name, i, j, round(rng.uniform(0.3, 1.3), 2)))
    return drawn


class Pool:
    """Tensors of one shape, views of them that may be written, and results."""

    def __init__(self, x: Tensor) -> None:
        self.whole = [x]
        self.parts = [x]
        self.outputs: list[Tensor] = []

    def pick(self, i: int) -> Tensor:
        """One of the last few: what is old is seldom used."""
        return self.whole[-1 - i % min(len(self.whole), 5)]

    def pick_to_write(self, i: int) -> Tensor:
        recent = self.whole[-4:] + self.parts[-3:]
        return recent[i % len(recent)]

    def add(self, tensor: Tensor) -> None:
        if tensor.shape == (ROWS, WIDTH):
            self.whole.append(tensor)
        else:
            self.parts.append(tensor)
            self.whole.append(self.pick(0) + tensor.float().mean())


class Part(nn.Module):
    """One layer: a piece of the program, with weights and a buffer of its own."""

    state: Tensor

    def __init__(self, program: list[Instruction], inner: Part | None = None) -> None:
        super().__init__()
        self.program = program
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.tagged = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.tagged.tag = 0.5  # type: ignore[attr-defined]
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("state", torch.rand(ROWS, WIDTH))
        self.inner = inner

    def forward(self, x: Tensor, pool: Pool) -> Tensor:
        pool.whole.append(x)
        left = 0  # instructions until the mode ends
        with ExitStack() as modes:
            for instruction in self.program:
                if instruction.kind == "mode":
                    modes.close()
                    modes.enter_context(Rounds())
                    left = 2 + instruction.i % 4
                self.run(instruction, pool)
                left -= 1
                if left == 0:
                    modes.close()
        return pool.whole[-1] + 1

    def run(self, step: Instruction, pool: Pool) -> None:
        """Each kind is a method of the same name."""
        a, b = pool.pick(step.i), pool.pick(step.j)
        made = getattr(self, f"_{step.kind}")(step, pool, a, b)
        if isinstance(made, Tensor):
            pool.add(made)

    def _pure(self, step: Instruction, pool: Pool, a: Tensor, b: Tensor) -> Tensor:
        return PURE[step.name](a, b, step.c)

    def _view(self, step: Instruction, pool: Pool, a: Tensor, b: Tensor) -> Tensor:
        return VIEWS[step.name](a)

    def _write(self, step: Instruction, pool: Pool, a: Tensor, b: Tensor) -> None:
        value = b.detach() if step.j % 2 else b
        WRITES[step.name](pool.pick_to_write(step.i), value, step.c)

    def _data_view(self, step: Instruction, pool: Pool, a: Tensor, b: Tensor) -> Tensor:
        return a.data

    def _data_write(self, step: Instruction, pool: Pool, a: Tensor, b: Tensor) -> None:
        WRITES[step.name](pool.pick_to_write(step.i).data, b.detach(), step.c)

    @torch.no_grad()
    def _without_gradient(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> Tensor:
        return WITHOUT_GRADIENT[step.name](a, b, step.c)

    @torch.no_grad()
    def _write_without_gradient(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> None:
        WRITES[step.name](pool.pick_to_write(step.i), b.detach(), step.c)

    def _linear(self, step: Instruction, pool: Pool, a: Tensor, b: Tensor) -> Tensor:
        made: Tensor = self.linear(a)
        return made

    def _batch_norm(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> Tensor:
        made: Tensor = self.norm(a)
        return made

    def _buffer_read(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> Tensor:
        return a * (self.state * step.c).sin()

    @torch.no_grad()
    def _buffer_write(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> None:
        self.state.mul_(0.9).add_(a.detach(), alpha=0.1)

    @torch.no_grad()
    def _parameter_write(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> None:
        self.linear.bias.add_(0.01)

    def _unknown_memory(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> Tensor:
        """Some of it is never written, and never read."""
        scale = torch.empty_like(a)
        with torch.no_grad():
            scale[: 3 + step.i % 4] = step.c
            scale[3:].copy_(b[3:])
        return a * scale[:1] + scale[3:].mean()

    def _output(self, step: Instruction, pool: Pool, a: Tensor, b: Tensor) -> None:
        pool.outputs.append(a)

    def _part(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> Tensor | None:
        return None if self.inner is None else self.inner(a, pool)

    def _function(self, step: Instruction, pool: Pool, a: Tensor, b: Tensor) -> Tensor:
        return FUNCTIONS[step.name](a, b, step.c)

    def _unseen_function(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> Tensor:
        return UNSEEN_FUNCTIONS[step.name](a, b, step.c)

    def _tagged_weight(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> Tensor:
        made: Tensor = TaggedWeight.apply(a, self.tagged)
        return made

    def _mode(self, step: Instruction, pool: Pool, a: Tensor, b: Tensor) -> None:
        """Was entered by forward."""

    def _hidden_write(
        self, step: Instruction, pool: Pool, a: Tensor, b: Tensor
    ) -> None:
        halve(pool.pick_to_write(step.i))

    def _collective(self, step: Instruction, pool: Pool, a: Tensor, b: Tensor) -> None:
        if step.name == "reduce":
            reduce(a)
        elif a.is_contiguous() and a is not b:
            gather(a, b)


class Program(nn.Module):
    """Parts with a pool between them; gives the loss, results and the pool."""

    def __init__(
        self, seed: int, without: Collection[str] = (), keep: int = -1
    ) -> None:
        """``keep``: of the instructions, as the bits of a number; -1 is all."""
        super().__init__()
        rng = random.Random(seed)
        self._left = keep
        num_parts = 1 + seed % 3
        length = (14 + seed % 20) // num_parts
        self.stem = nn.Linear(WIDTH, WIDTH)
        parts = []
        for _ in range(num_parts):
            outer, inner = draw(rng, length), draw(rng, 4)
            inner_part = Part(self._chosen(inner, without))
            parts.append(Part(self._chosen(outer, without), inner_part))
        self.parts = nn.ModuleList(parts)

    def _chosen(
        self, drawn: list[Instruction], without: Collection[str]
    ) -> list[Instruction]:
        chosen = []
        for instruction in drawn:
            if self._left & 1 and instruction.kind not in without:
                chosen.append(instruction)
            self._left >>= 1
        return chosen

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], Pool]:
        pool = Pool(x * 1)
        h = self.stem(x)
        for part in self.parts:
            h = part(h, pool)
        total = h.tanh().square().mean()
        for tensor in pool.whole[:: max(1, len(pool.whole) // 5)]:
            total = total + tensor.float().sin().mean()
        for tensor in pool.outputs:
            total = total + tensor.float().mean()
        pool.outputs.append(h)
        return total, pool.outputs, pool

    def text(self) -> str:
        """The program, a line for each instruction."""
        lines = []
        for i, part in enumerate(self.parts):
            assert isinstance(part, Part)
            lines += [f"part {i}: {instruction}" for instruction in part.program]
            if part.inner is not None:
                lines += [f"inside of part {i}: {each}" for each in part.inner.program]
        return "\n".join(lines)
