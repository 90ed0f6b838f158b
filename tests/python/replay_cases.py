"""Train a model plain and with replay attached, and compare all that training shows.

A hazard test hands over a small model; from the same seeds it is trained plain and
attached, and after every step loss, gradients, parameters, buffers, random states
and the batch itself must be the same to the bit. Where eager raises, so must we.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from memscale import replay

WIDTH = 8
ROWS = 6

Hazard = Callable[[Tensor], Tensor]
Build = Callable[[], nn.Module]
Batch = Callable[[], Tensor]
Step = Callable[[nn.Module, Tensor], Tensor]
Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Where:
    """The policy of every layer (or of some, by name), and the device."""

    policy: str | dict[str, str]
    device: str

    def __str__(self) -> str:
        return f"{self.policy}-{self.device}"


POLICIES = ("cheap", "block")
_ON_CPU = [Where(policy, "cpu") for policy in POLICIES]
_ON_SIM = [Where(policy, "sim") for policy in POLICIES]
ON_CPU = pytest.mark.parametrize("where", _ON_CPU, ids=str)
ON_SIM = pytest.mark.parametrize("where", _ON_SIM, ids=str)
EVERYWHERE = pytest.mark.parametrize("where", _ON_CPU + _ON_SIM, ids=str)


class Block(nn.Module):
    """A layer around the hazard, with ops that save tensors on both sides of it.

    ``sin`` does not save its result, so a hazard may change what it is given; and
    it saves its input, the result of a matmul, which "cheap" keeps.
    """

    def __init__(self, hazard: Hazard) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.hazard = hazard
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hazard(self.before(x).sin())
        out: Tensor = self.after(nn.functional.silu(h)) + x
        return out


class Net(nn.Module):
    """Blocks between two linear maps, two equal ones if not told; gives the loss."""

    def __init__(self, *blocks: Build) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        both = blocks * 2 if len(blocks) == 1 else blocks
        self.blocks = nn.ModuleList(block() for block in both)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        loss: Tensor = self.head(h).tanh().square().mean()
        return loss


def around(hazard: Hazard) -> Build:
    """A net whose blocks hold a function as their hazard."""
    return lambda: Net(lambda: Block(hazard))


def around_module(make: Callable[[], nn.Module]) -> Build:
    """A net whose blocks hold a module as their hazard, each its own."""
    return lambda: Net(lambda: Block(make()))


def of_blocks(*blocks: Build) -> Build:
    """A net of blocks that the test wrote itself; of two, if it wrote one."""
    return lambda: Net(*blocks)


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def rows_with_grad() -> Tensor:
    return rows().requires_grad_()


def step(model: nn.Module, x: Tensor) -> Tensor:
    """What most training loops do."""
    loss: Tensor = model(x)
    loss.backward()
    return loss


def change_between(change: Callable[[nn.Module, Tensor], object]) -> Step:
    """A step in which something is changed between forward and backward."""

    def changed_step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        with torch.no_grad():
            change(model, x)
        loss.backward()
        return loss

    return changed_step


def forward_under(context: Context) -> Step:
    """A step whose forward alone runs under ``context``."""

    def under(model: nn.Module, x: Tensor) -> Tensor:
        with context():
            loss: Tensor = model(x)
        loss.backward()
        return loss

    return under


def step_under(context: Context) -> Step:
    """A step that runs under ``context``, backward and all."""

    def under(model: nn.Module, x: Tensor) -> Tensor:
        with context():
            return step(model, x)

    return under


@dataclass
class Run:
    """What each step showed: tensors by name, or the error that it raised."""

    steps: list[dict[str, Tensor | None]] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    stats: replay.Stats | None = None


def train(
    build: Build,
    where: Where,
    *,
    attached: bool,
    batch: Batch = rows,
    steps: Sequence[Step] = (step,) * 3,
) -> Run:
    """Train what ``build`` makes, one step after the other, all from fixed seeds."""
    torch.manual_seed(0)
    model = build().to(where.device)
    batches = [_placed(batch(), where.device) for _ in steps]
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05)
    run = Run()
    handle = replay.attach(model, where.policy, min_bytes=0) if attached else None
    try:
        torch.manual_seed(1)
        for one_step, x in zip(steps, batches, strict=True):
            optimizer.zero_grad()
            try:
                loss = one_step(model, x)
            except RuntimeError as error:
                run.errors.append(str(error))
                run.steps.append(_random_states(model))
                continue
            seen = {"loss": loss, **_gradients(model, x)}
            optimizer.step()
            seen |= {"batch": x, **_tensors(model), **_random_states(model)}
            run.errors.append(None)
            run.steps.append(
                {k: None if v is None else _copied(v) for k, v in seen.items()}
            )
    finally:
        if handle is not None:
            run.stats = handle.stats()
            handle.detach()
    return run


def _copied(tensor: Tensor) -> Tensor:
    """On the host: a failed comparison then holds no memory of the device."""
    return tensor.detach().cpu().clone()


def _placed(x: Tensor, device: str) -> Tensor:
    return x.detach().to(device).requires_grad_(x.requires_grad)


def _gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    found = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return {**found, "gradient of the batch": x.grad}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters())
    return tensors | {f"buffer {name}": b for name, b in model.named_buffers()}


def _random_states(model: nn.Module) -> dict[str, Tensor | None]:
    states: dict[str, Tensor | None] = {
        "random state of cpu": torch.get_rng_state(),
        "random state of sim": torch.get_device_module("sim").get_rng_state(),
    }
    for name, module in model.named_modules():
        generator = getattr(module, "generator", None)
        if isinstance(generator, torch.Generator):
            states[f"generator of {name}"] = generator.get_state()
    return states


def identical(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal to the bit, and of the same kind."""
    if a is None or b is None:
        return a is b
    if (a.dtype, a.layout, a.shape) != (b.dtype, b.layout, b.shape):
        return False
    if a.layout == torch.sparse_coo:
        return torch.equal(a._indices(), b._indices()) and torch.equal(
            a._values(), b._values()
        )
    return torch.equal(a, b)


def first_difference(plain: Run, ours: Run) -> str | None:
    """The first thing that is not the same, or None."""
    for i, (a, b) in enumerate(zip(plain.steps, ours.steps, strict=True)):
        theirs, our = (_without_node(run.errors[i]) for run in (plain, ours))
        if theirs != our:
            return f"step {i}: error {theirs!r}, ours {our!r}"
        if a.keys() != b.keys():
            return f"step {i}: {sorted(a.keys() ^ b.keys())} in one run only"
        for name in a:
            if not identical(a[name], b[name]):
                return f"step {i}: {name}: {_how_far(a[name], b[name])}"
    return None


def _without_node(message: str | None) -> str | None:
    """Torch names the node that made the tensor last; all else must be the same."""
    return message and re.sub(r", which is output \d+ of [\w:]+,", "", message)


def _how_far(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None or a.shape != b.shape or a.is_sparse:
        return f"{a}, ours {b}"
    return f"off by {(a.double() - b.double()).abs().max():.3g}"


def assert_same(
    build: Build,
    where: Where,
    *,
    batch: Batch = rows,
    steps: Sequence[Step] = (step,) * 3,
    drops: bool = True,
) -> replay.Stats:
    """No step raises, and plain and attached show the same; stats of the latter.

    With ``drops``, saves must have been dropped and ops replayed: an engine that
    keeps everything is equal to eager, too.
    """
    plain = train(build, where, attached=False, batch=batch, steps=steps)
    assert plain.errors == [None] * len(steps), plain.errors
    last = plain.steps[-1]["loss"]
    assert last is not None
    assert last.isfinite().all(), "not a number is equal to nothing"
    return _compared(plain, build, where, batch, steps, drops)


def assert_same_error(
    build: Build,
    where: Where,
    broken: Step,
    *,
    says: str = "modified by an inplace operation",
    batch: Batch = rows,
    drops: bool = True,
) -> replay.Stats:
    """Both raise the same error in a broken step; the steps after it are the same."""
    steps = (step, broken, step, step)
    plain = train(build, where, attached=False, batch=batch, steps=steps)
    assert says in (plain.errors[1] or ""), plain.errors
    assert plain.errors[2:] == [None, None]
    return _compared(plain, build, where, batch, steps, drops)


def _compared(
    plain: Run,
    build: Build,
    where: Where,
    batch: Batch,
    steps: Sequence[Step],
    drops: bool,
) -> replay.Stats:
    ours = train(build, where, attached=True, batch=batch, steps=steps)
    difference = first_difference(plain, ours)
    assert difference is None, difference
    assert ours.stats is not None
    if drops:
        assert ours.stats.saves_dropped > 0, ours.stats
        assert ours.stats.ops_replayed > 0, ours.stats
    return ours.stats


def assert_same_or_refused(build: Build, where: Where, touchy: Step) -> None:
    """Eager does not mind; ours trains the same or refuses in torch's words.

    For a parameter that only the replay needs: it may be too late to be right, but
    never too late to say so.
    """
    steps = (step, touchy, step)
    plain = train(build, where, attached=False, steps=steps)
    assert plain.errors == [None] * 3
    ours = train(build, where, attached=True, steps=steps)
    if ours.errors[1] is None:
        difference = first_difference(plain, ours)
        assert difference is None, difference
        return
    assert "modified by an inplace operation" in ours.errors[1], ours.errors
    assert ours.errors[2] is None, ours.errors
