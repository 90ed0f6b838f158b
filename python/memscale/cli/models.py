"""The models that a command line can name: see memscale.cli.

Those of memscale.benchmarks by name, and one's own as package.module:factory.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memscale._C import InputError
from memscale.benchmarks.models import BENCHMARK_MODELS, BenchmarkModel
from memscale.model.inputs import LossFn

__all__ = ["DTYPES", "Subject", "UsageError", "find_subject"]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}


class UsageError(Exception):
    """The command line asks for what there is not: status 2."""


@dataclass
class Subject:
    """What to estimate."""

    title: str
    model: nn.Module
    sample: Any = None
    loss_fn: LossFn | None = None


def find_subject(options: argparse.Namespace) -> Subject:
    find = _from_factory if ":" in options.model else _from_name
    subject = find(options)
    if options.dtype is not None:
        _convert(subject, DTYPES[options.dtype])
    return subject


def _convert(subject: Subject, dtype: torch.dtype) -> None:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    subject.model = subject.model.to(dtype)
    subject.sample = pytree.tree_map_only(torch.Tensor, convert, subject.sample)


# ---- models by name ----


def _from_name(options: argparse.Namespace) -> Subject:
    entry = _find_model(options.model)
    batch, seq = options.batch or entry.batch, options.seq or entry.seq
    overrides = dict(options.overrides)
    try:
        with torch.device("meta"):
            model = entry.build(**overrides)
    except TypeError as error:  # a constructor that does not take an override
        if not overrides:
            raise
        raise UsageError(f"--set: {error}") from error
    _check_overrides(model, overrides)
    _check_length(model, seq)
    title = f"{entry.name}: {entry.description}; batch {batch}, seq {seq}"
    if overrides:
        title += "; " + ", ".join(f"{k}={v}" for k, v in overrides.items())
    sample = entry.sample(batch, seq, "cpu")
    return Subject(title, model, sample, entry.loss_fn)


def _find_model(name: str) -> BenchmarkModel:
    """By name; case and punctuation do not matter: "GPT-2 Medium"."""
    by_key = {_key(known): entry for known, entry in BENCHMARK_MODELS.items()}
    if _key(name) in by_key:
        return by_key[_key(name)]
    close = difflib.get_close_matches(_key(name), by_key, n=3, cutoff=0.5)
    if close:
        hint = f"did you mean {', '.join(by_key[key].name for key in close)}?"
    else:
        hint = '"memscale models" lists them; your own is package.module:factory'
    raise UsageError(f"no model named {name!r}: {hint}")


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _check_overrides(model: nn.Module, overrides: dict[str, Any]) -> None:
    """A configuration takes any field; one it did not have is a slip."""
    config = getattr(model, "config", None)
    if config is None:
        return
    known = [*type(config)().to_dict(), *getattr(config, "attribute_map", {})]
    for name in overrides:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f": did you mean {', '.join(close)}?" if close else ""
            raise UsageError(f"--set: {type(config).__name__} has no {name!r}{hint}")


def _check_length(model: nn.Module, seq: int) -> None:
    """On fake tensors nobody sees that a position is not in the table."""
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and seq > limit:
        raise InputError(
            f"--seq must be at most the model's {limit} positions, got {seq}; "
            f"--set max_position_embeddings={seq} gives it more"
        )


# ---- models of one's own ----


def _from_factory(options: argparse.Namespace) -> Subject:
    if options.overrides:
        raise UsageError("--set is for models known by name; change the factory")
    made = _call_factory(_find_factory(options.model))
    model, sample = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{options.model} must return a torch.nn.Module or (model, sample), "
            f"got {type(made).__name__}"
        )
    if sample is not None and (options.batch or options.seq):
        raise UsageError(
            f"{options.model} returns a sample: --batch and --seq do not apply"
        )
    return Subject(f"{options.model}: {type(model).__name__}", model, sample)


def _find_factory(text: str) -> Callable[[], Any]:
    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise UsageError(f"no module named {module_name!r}") from error
    except ValueError as error:  # an empty name
        raise UsageError(f"{text!r} is not package.module:factory") from error
    factory: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(factory):
        raise UsageError(f"module {module_name!r} has no function {name!r}")
    return factory


def _call_factory(factory: Callable[[], Any]) -> Any:
    """On meta, where weights cost nothing; plainly if that does not work."""
    try:
        with torch.device("meta"):
            return factory()
    except Exception:
        return factory()
