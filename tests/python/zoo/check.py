"""One model: made, given a batch, trained plain and in each of our ways."""

from __future__ import annotations

import copy
import gc
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from zoo import budgets, compare, torch_models
from zoo.architectures import Architecture, architectures, build
from zoo.budgets import Shown, brief
from zoo.exceptions import EXCEPTIONS
from zoo.inputs import Batch, batches
from zoo.shrink import configs_in, shrunk

MAX_PARAMETERS = 5_000_000
ARMS = (*compare.ARMS, *budgets.DEVICES)
# Equality in every way but the slowest, and what each device shows.
DEFAULT_ARMS = ("wrap", "block", *budgets.DEVICES)


@dataclass(frozen=True)
class Outcome:
    """``status``: passed, failed or skipped; ``text``: what was compared, or why.

    It says whether training was the same. What each device showed of plans, budgets
    and estimates is in ``shown``, to be judged in zoo.goals.
    """

    kind: str
    status: str
    text: str
    shown: dict[str, Shown] = field(default_factory=dict)
    has_random_depth: bool = False

    def __str__(self) -> str:
        devices = [f"{device}: {shown}" for device, shown in self.shown.items()]
        return "; ".join([f"{self.status:7} {self.kind}: {self.text}", *devices])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Outcome:
        """Raises ValueError for one that was written before there was ``shown``."""
        if "shown" not in fields:
            raise ValueError("it was written by an earlier zoo, without budgets")
        shown = {device: Shown.from_json(e) for device, e in fields["shown"].items()}
        return cls(**{**fields, "shown": shown})


class Skip(Exception):
    """Why a model cannot be compared here. No fault of ours."""


@dataclass
class Subject:
    """A model with its batch, and what to say of it."""

    model: nn.Module
    batch: Batch
    about: list[str]
    has_random_depth: bool = False


def kinds() -> list[str]:
    """All that there are: those in plain torch, then transformers' model types."""
    return [*torch_models.MODELS, *architectures()]


def check(kind: str, arms: tuple[str, ...] = DEFAULT_ARMS) -> Outcome:
    """Train it, and compare all that training shows."""
    warnings.filterwarnings("ignore")
    _quiet()
    try:
        subject = _subject(kind)
        plain = _plain(subject.model, subject.batch)
    except Skip as reason:
        return Outcome(kind, "skipped", str(reason))
    model, batch, about = subject.model, subject.batch, subject.about
    if not plain.random_ops:
        if _has_dropout(model):
            return Outcome(kind, "skipped", "it has dropout, and none of it ran")
        about.append("no random op")
    parts, failed = [", ".join(about)], False
    for name in arms:
        if name not in compare.ARMS:
            continue
        try:
            arm = compare.ARMS[name](copy.deepcopy(model), batch, plain)
        except Exception as error:
            failed = True
            parts.append(f"{name}: RAISES {brief(error)}")
            continue
        failed |= not arm.is_equal
        parts.append(f"{name}: {arm}")
        if arm.difference is not None and _is_by_the_cache(model, batch, plain):
            parts.append("a plain model without use_cache differs, too")
    gc.collect()
    shown = {
        device: budgets.show(model, batch, device)
        for device in budgets.DEVICES
        if device in arms
    }
    failed |= any(each.difference is not None for each in shown.values())
    status = "failed" if failed else "passed"
    return Outcome(kind, status, "; ".join(parts), shown, subject.has_random_depth)


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()


def _subject(kind: str) -> Subject:
    if kind in torch_models.MODELS:
        entry = torch_models.MODELS[kind]
        compare.seed(0)
        model, batch = entry.make()
        return Subject(model.train(), batch, ["plain torch"], entry.has_random_depth)
    architecture = architectures()[kind]
    model = _make(architecture)
    taken, batch = _batch_for(model, architecture)
    about = [architecture.class_name, architecture.task]
    about += [taken] if taken else []
    return Subject(model, batch, about, _has_layer_drop(model))


def _make(architecture: Architecture) -> nn.Module:
    try:
        _check_size(architecture)
        compare.seed(0)
        config = shrunk(architecture.kind, EXCEPTIONS)
        model: nn.Module = build(architecture, config).train()
    except Skip:
        raise
    except Exception as error:
        raise Skip(f"it cannot be made: {brief(error)}") from error
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
    raise Skip(f"no batch of ours fits: {brief(first)}")


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


def _has_layer_drop(model: Any) -> bool:
    """Whether layers are left out at random, by a field of its config."""
    return any(
        "layerdrop" in name.replace("_", "") and isinstance(value, float) and value > 0
        for config in configs_in(model.config)
        for name, value in vars(config).items()
    )
