"""What a training step holds and takes: plain, checkpointed and under replay.

All variants train one model in one process. What a variant attaches is taken off
again before the next one runs, so that none pays for another's hooks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memscale import replay
from memscale.benchmarks.measure import forward, loss_of
from memscale.benchmarks.models import BENCHMARK_MODELS, Sample
from memscale.memory import track
from memscale.model.layers import find_layers

__all__ = [
    "CASES",
    "QUICK_CASES",
    "VARIANTS",
    "Case",
    "checkpointed",
    "difference",
    "measure_case",
    "order_of",
    "spread",
]

# Attaches a variant to the model; the handle is None where replay has no part.
Attach = Callable[[nn.Module], AbstractContextManager[replay.Replay | None]]

_TRANSFORMER_SHARE, _CNN_SHARE = 0.45, 0.55
# A cache of keys and values is of no use in training, and checkpointing, which
# would fill it twice, cannot run with it: Hugging Face too switches it off.
_GPT2 = {"use_cache": False}
_WIDE = {
    **_GPT2,
    "n_embd": 1024,
    "n_head": 16,
    "n_positions": 512,
    # Few words, so that the blocks are nearly all of the step.
    "vocab_size": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
_FEW_WORDS = {"vocab_size": 4096, "bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True)
class Case:
    """A model and a batch. ``bytes_share`` is the goal of what cheap may hold."""

    name: str
    model: str
    batch: int
    seq: int
    overrides: Mapping[str, object] = field(default_factory=dict)
    bytes_share: float = _TRANSFORMER_SHARE

    @property
    def label(self) -> str:
        return f"{self.name} {self.batch}x{self.seq}"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return BENCHMARK_MODELS[self.model].build(**self.overrides)

    def sample(self) -> Sample:
        return BENCHMARK_MODELS[self.model].sample(self.batch, self.seq, "cpu")


CASES = [
    Case("GPT-2 small", "gpt2", 2, 256, _GPT2),
    Case("GPT-2 blocks 1024 wide", "gpt2", 2, 512, {**_WIDE, "n_layer": 6}),
    Case("BERT-Base", "bert-base", 16, 128),
    Case("ResNet-18", "resnet18", 8, 224, bytes_share=_CNN_SHARE),
]
# The same models with fewer layers, words and examples.
QUICK_CASES = [
    Case(
        "GPT-2 small, 2 layers", "gpt2", 2, 128, {**_GPT2, **_FEW_WORDS, "n_layer": 2}
    ),
    Case("GPT-2 blocks 1024 wide, 2 layers", "gpt2", 1, 128, {**_WIDE, "n_layer": 2}),
    Case(
        "BERT-Base, 2 layers",
        "bert-base",
        2,
        128,
        {"num_hidden_layers": 2, "vocab_size": 4096},
    ),
    Case("ResNet-18", "resnet18", 2, 224, bytes_share=_CNN_SHARE),
]


@contextlib.contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    yield


@contextlib.contextmanager
def checkpointed(
    model: nn.Module, names: Collection[str] | None = None
) -> Iterator[None]:
    """``torch.utils.checkpoint``, not reentrant, around blocks of ``model``: all, or
    those of these names."""
    layers = find_layers(model)
    chosen = layers.blocks if names is None else names
    blocks = [layers.modules[name] for name in chosen]
    for block in blocks:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False
        )
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _replayed(policy: str, only_blocks: bool = False) -> Attach:
    """Under replay; ``only_blocks``: those that ``checkpointed`` takes, no others."""

    @contextlib.contextmanager
    def attach(model: nn.Module) -> Iterator[replay.Replay]:
        chosen = dict.fromkeys(find_layers(model).blocks, policy)
        handle = replay.attach(model, chosen if only_blocks and chosen else policy)
        try:
            yield handle
        finally:
            handle.detach()

    return attach


# Those that are compared with each other run one after the other.
VARIANTS: dict[str, Attach] = {
    "eager": _eager,
    "keep": _replayed("keep"),
    "cheap": _replayed("cheap"),
    "checkpoint": checkpointed,
    "block": _replayed("block", only_blocks=True),
}
_PEERS = ("eager", "checkpoint")


def _step(model: nn.Module, batch: Sample) -> torch.Tensor:
    # ``out`` lives through backward, as it does in most training loops.
    out = forward(model, batch)
    loss = loss_of(out)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _clear(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    # One variant's garbage must not be counted, or swept up, in the next one's step.
    gc.collect()


def _result(model: nn.Module, batch: Sample) -> dict[str, torch.Tensor]:
    """Loss and gradients of a step that always draws the same dropout."""
    _clear(model)
    torch.manual_seed(1)
    loss = _step(model, batch)
    gradients = {
        f"gradient of {name}": parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss, **gradients}


def difference(
    ours: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]
) -> str:
    """The first thing that is not the same to the bit; empty if all is."""
    if ours.keys() != plain.keys():
        return ", ".join(sorted(ours.keys() ^ plain.keys()))
    for name, tensor in plain.items():
        if not torch.equal(ours[name], tensor):
            return name
    return ""


def _memory(model: nn.Module, batch: Sample) -> tuple[int, int]:
    """Bytes that a step adds: alive after forward, and at its peak."""
    with track("cpu") as memory:
        out = forward(model, batch)
        alive = memory.current - memory.before
        loss_of(out).backward()  # type: ignore[no-untyped-call]
    return alive, memory.peak - memory.before


def _settled_row(
    model: nn.Module, batch: Sample, handle: replay.Replay | None
) -> dict[str, Any]:
    """What a step after the first one holds and, under replay, does."""
    _clear(model)
    if handle is not None:
        handle.reset_stats()
    alive, peak = _memory(model, batch)
    counts = {} if handle is None else asdict(handle.stats())
    # Again, into the gradients that are there now: as they grow no more, this peak
    # shows what backward recomputes where the other may hide it.
    _, accumulating = _memory(model, batch)
    return {
        "activation_bytes": alive,
        "peak_bytes": peak,
        "accumulating_peak_bytes": accumulating,
        **counts,
    }


def _seconds(model: nn.Module, batch: Sample) -> float:
    _clear(model)
    start = time.process_time()
    _step(model, batch)
    return time.process_time() - start


def order_of(names: list[str], turn: int) -> list[str]:
    """Each variant is first, and each neighbour before the other, equally often."""
    start = (turn // 2) % len(names)
    order = names[start:] + names[:start]
    return order[::-1] if turn % 2 else order


def spread(figures: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(figures) == 1:
        return dict.fromkeys(("q1", "median", "q3"), figures[0])
    quartiles = statistics.quantiles(figures, n=4, method="inclusive")
    return dict(zip(("q1", "median", "q3"), quartiles, strict=True))


def _checked(
    case: Case, model: nn.Module, batch: Sample, variants: Mapping[str, Attach]
) -> dict[str, dict[str, Any]]:
    """Rows of bytes and counts. Their first steps warm up all that is timed later."""
    plain = _result(model, batch)
    rows: dict[str, dict[str, Any]] = {}
    for name, attach in variants.items():
        with attach(model) as handle:
            different = difference(_result(model, batch), plain)
            if different and name != "checkpoint":
                raise RuntimeError(f"{case.label}, {name}: unlike eager: {different}")
            rows[name] = {
                "case": case.label,
                "variant": name,
                "equal_to_eager": not different,
                **_settled_row(model, batch, handle),
            }
    return rows


def _timed(
    model: nn.Module, batch: Sample, rounds: int, variants: Mapping[str, Attach]
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        for name in order_of(list(variants), turn):
            with variants[name](model):
                seconds[name].append(_seconds(model, batch))
    return seconds


def measure_case(
    case: Case, rounds: int, variants: Mapping[str, Attach] = VARIANTS
) -> list[dict[str, Any]]:
    """A row per variant. Raises if one of ours is not eager's equal to the bit."""
    model, batch = case.build(), case.sample()
    # Libraries leave many objects; looking through them would take a step's time.
    gc.collect()
    gc.freeze()
    try:
        rows = _checked(case, model, batch, variants)
        seconds = _timed(model, batch, rounds, variants)
    finally:
        gc.unfreeze()
    for name, row in rows.items():
        row["rounds"] = rounds
        row["seconds"] = spread(seconds[name])
        for peer in _PEERS:
            pairs = zip(seconds[name], seconds[peer], strict=True)
            row[f"time_over_{peer}"] = spread([ours / its for ours, its in pairs])
    return list(rows.values())
