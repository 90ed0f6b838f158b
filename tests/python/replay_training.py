"""One way of training for tests of replay: a few steps, everything recorded.

What a run records is one flat dictionary of tensors on the CPU, so that two runs
can be compared to the bit and the first difference named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

import replay_hf_zoo
import replay_odd_zoo
import replay_torch_zoo
from memscale import replay
from replay_torch_zoo import Architecture, Batch

ARCHITECTURES: dict[str, Architecture] = {
    **replay_torch_zoo.ARCHITECTURES,
    **replay_odd_zoo.ARCHITECTURES,
    **replay_hf_zoo.ARCHITECTURES,
}
STEPS = 5


@dataclass(frozen=True)
class Recipe:
    """How the loop is written. Losses are summed over ``batches`` per step."""

    batches: int = 1
    # One backward over the sum of the losses: several tapes are alive at once.
    together: bool = False
    clip: float | None = None
    autocast: bool = False
    dtype: torch.dtype = torch.float32


@dataclass
class Run:
    recorded: dict[str, torch.Tensor] = field(default_factory=dict)
    # None of a run without replay.
    stats: replay.Stats | None = None

    def record(self, name: str, tensor: torch.Tensor) -> None:
        assert name not in self.recorded
        self.recorded[name] = tensor.detach().cpu().clone()


def train(
    name: str,
    device: str,
    policy: replay.Policy | Mapping[str, replay.Policy] | None,
    recipe: Recipe | None = None,
    seed: int = 7,
    min_bytes: int = 0,
    made_on: str | None = None,
) -> Run:
    """Train an architecture; ``policy`` None is the plain model.

    A model made on another device is attached there, then moved.
    """
    recipe = recipe or Recipe()
    torch.manual_seed(0)
    model = ARCHITECTURES[name].build().to(made_on or device).train()
    if recipe.dtype != torch.float32:
        model.to(recipe.dtype)
    batches = [_batch(name, device, recipe) for _ in range(recipe.batches)]
    handle = None
    if policy is not None:
        handle = replay.attach(model, policy, min_bytes=min_bytes)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = Run()
    torch.manual_seed(seed)
    try:
        for step in range(STEPS):
            _step(run, f"step {step}", model, batches, optimizer, recipe, device)
        _record_state(run, model, optimizer)
    finally:
        if handle is not None:
            run.stats = handle.stats()
            handle.detach()
    return run


def first_difference(a: Run, b: Run) -> str | None:
    """The first tensor that is not the same to the bit, or None."""
    if a.recorded.keys() != b.recorded.keys():
        return f"recorded by one only: {sorted(a.recorded.keys() ^ b.recorded.keys())}"
    for name, tensor in a.recorded.items():
        other = b.recorded[name]
        if tensor.dtype != other.dtype or not torch.equal(tensor, other):
            return name
    return None


def _batch(name: str, device: str, recipe: Recipe) -> Batch:
    return tuple(
        t.to(device, recipe.dtype if t.is_floating_point() else t.dtype)
        for t in ARCHITECTURES[name].batch()
    )


def _step(
    run: Run,
    step: str,
    model: nn.Module,
    batches: list[Batch],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    device: str,
) -> None:
    optimizer.zero_grad()
    losses = []
    for i, batch in enumerate(batches):
        with _autocast(recipe, device):
            loss = model(*batch)
        run.record(f"{step}: loss {i}", loss)
        _record_randomness(run, f"{step}: after forward {i}", device)
        if not recipe.together:
            loss.backward()
            _record_randomness(run, f"{step}: after backward {i}", device)
        losses.append(loss)
    if recipe.together:
        torch.stack(losses).sum().backward()
        _record_randomness(run, f"{step}: after backward", device)
    if recipe.clip is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        run.record(f"{step}: norm of gradients", norm)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            run.record(f"{step}: gradient of {name}", parameter.grad)
    optimizer.step()


@contextlib.contextmanager
def _autocast(recipe: Recipe, device: str) -> Iterator[None]:
    with torch.autocast(device, torch.bfloat16, enabled=recipe.autocast):
        yield


def _record_randomness(run: Run, when: str, device: str) -> None:
    run.record(f"{when}: random state of cpu", torch.get_rng_state())
    if device == "sim":
        state = torch.get_device_module("sim").get_rng_state()
        run.record(f"{when}: random state of sim", state)


def _record_state(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        run.record(f"parameter {name}", parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            run.record(f"optimizer's {key} of {name}", value)
    for name, buffer in model.named_buffers():
        run.record(f"buffer {name}", buffer)
