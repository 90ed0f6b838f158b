"""One architecture: made tiny, given a batch, trained plain and in each of our ways."""

from __future__ import annotations

import copy
import gc
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo import compare
from zoo.architectures import Architecture, architectures, build
from zoo.exceptions import EXCEPTIONS
from zoo.inputs import Batch, batches
from zoo.shrink import shrunk

MAX_PARAMETERS = 5_000_000


@dataclass(frozen=True)
class Outcome:
    """``status``: passed, failed or skipped; ``text``: what was compared, or why."""

    kind: str
    status: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:7} {self.kind}: {self.text}"


class Skip(Exception):
    """Why an architecture cannot be compared here. No fault of ours."""


def check(kind: str, arms: tuple[str, ...] = ("wrap", "block")) -> Outcome:
    """Train it, and compare all that training shows."""
    warnings.filterwarnings("ignore")
    _quiet()
    architecture = architectures()[kind]
    try:
        model = _make(architecture)
        taken, batch = _batch_for(model, architecture)
        plain = _plain(model, batch)
    except Skip as reason:
        return Outcome(kind, "skipped", str(reason))
    about = [architecture.class_name, architecture.task]
    about += [taken] if taken else []
    if not plain.random_ops:
        if _has_dropout(model):
            return Outcome(kind, "skipped", "it has dropout, and none of it ran")
        about.append("no random op")
    parts, failed = [", ".join(about)], False
    for name in arms:
        try:
            arm = compare.ARMS[name](copy.deepcopy(model), batch, plain)
        except Exception as error:
            failed = True
            parts.append(f"{name}: RAISES {_brief(error)}")
            continue
        failed |= not arm.is_equal
        parts.append(f"{name}: {arm}")
        if arm.difference is not None and _is_by_the_cache(model, batch, plain):
            parts.append("a plain model without use_cache differs, too")
    gc.collect()
    return Outcome(kind, "failed" if failed else "passed", "; ".join(parts))


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()


def _make(architecture: Architecture) -> nn.Module:
    try:
        _check_size(architecture)
        compare.seed(0)
        config = shrunk(architecture.kind, EXCEPTIONS)
        model: nn.Module = build(architecture, config).train()
    except Skip:
        raise
    except Exception as error:
        raise Skip(f"it cannot be made: {_brief(error)}") from error
    if all(not p.requires_grad for p in model.parameters()):
        raise Skip("it has nothing to train")
    _fill(model)
    return model


def _check_size(architecture: Architecture) -> None:
    """Before memory is spent: a field that nothing shrinks may be huge."""
    config = shrunk(architecture.kind, EXCEPTIONS)
    try:
        with torch.device("meta"):
            model = build(architecture, config)
    except Exception:
        return  # some cannot be made there
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise Skip(f"its config does not get small: {count} parameters")


def _fill(model: nn.Module) -> None:
    """Some leave parameters as memory has them; with NaN, all would be equal."""
    with torch.no_grad():
        for parameter in model.parameters():
            data = parameter.detach()
            if data.is_floating_point() and not (data.abs() < 1e3).all():
                parameter.normal_(std=0.02)


def _batch_for(model: nn.Module, architecture: Architecture) -> tuple[str, Batch]:
    first: Exception | None = None
    compare.seed(2)
    for name, batch in batches(model, architecture.task):
        try:
            run = compare.train(copy.deepcopy(model), batch, steps=1)
        except Exception as error:
            first = first or error
            continue
        loss = run.recorded["step 0: loss"]
        if loss is not None and loss.isfinite():
            return name, batch
        first = first or ValueError("its loss is not finite")
    raise Skip(f"no batch of ours fits: {_brief(first)}")


def _plain(model: nn.Module, batch: Batch) -> compare.Run:
    """Trained twice: what differs without us says nothing about us."""
    run = compare.train(copy.deepcopy(model), batch)
    again = compare.train(copy.deepcopy(model), batch)
    difference = compare.first_difference(run, again)
    if difference is not None:
        raise Skip(f"plain training is not the same twice: {difference}")
    return run


def _is_by_the_cache(model: nn.Module, batch: Batch, plain: compare.Run) -> bool:
    """Whether no cache changes bits of this model: then that may be all."""
    try:
        run = compare.train(copy.deepcopy(model), {**batch, "use_cache": False})
    except Exception:
        return False
    return compare.first_difference(plain, run) is not None


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())


def _brief(error: Any) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
