"""The command ``memscale``.

::

    memscale estimate gpt2 --batch 4 --seq 512 --device "RTX 3090"
    memscale estimate my_package.my_module:make_model --json
    memscale models
    memscale cards

Models are built on the meta device, so no weights are needed, and nothing is
computed. Exit status: 0, 1 for an error, 2 for a wrong command line, 3 if
``--check-fits`` was asked for and it does not fit.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import memscale
from memscale import hardware
from memscale._C import Fit, HardwareError, InputError, format_bytes
from memscale._optimizer_step import optimizer_names
from memscale.benchmarks.models import BENCHMARK_MODELS, BenchmarkModel
from memscale.estimator import Estimate
from memscale.inputs import LossFn
from memscale.report import table

__all__ = ["main"]

_DTYPES = {
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough: "memscale cards | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        _complain(str(error))
        return 2
    except Exception as error:
        if options.debug:
            raise
        if isinstance(error, HardwareError):
            _complain(f'{error}; "memscale cards" lists the cards')
        elif isinstance(error, memscale.Error):
            _complain(str(error))
        else:  # the model's own
            _complain(f"{_one_line(error)} (--debug shows where)")
        return 1


def _complain(text: str) -> None:
    print(f"memscale: error: {text}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ---- the command line ----


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memscale", description="How many bytes a training step needs."
    )
    version = f"memscale {memscale.__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_estimate(commands)
    models = commands.add_parser("models", help="list the models known by name")
    models.set_defaults(run=_list_models, debug=False)
    cards = commands.add_parser("cards", help="list the cards known by name")
    cards.set_defaults(run=_list_cards, debug=False)
    return parser


def _add_estimate(commands: Any) -> None:
    parser = commands.add_parser(
        "estimate",
        help="predict the memory of a training step",
        description="Predict the memory of a training step, without running it.",
    )
    add = parser.add_argument
    add(
        "model",
        help='a name of "memscale models", or package.module:factory, a function '
        "without arguments that returns a model or (model, sample)",
    )
    add("--batch", type=_positive, help="default: the model's, or 1")
    add(
        "--seq",
        type=_positive,
        help="length of the sequence, or side of the image; default: the model's",
    )
    add(
        "--optimizer",
        type=_optimizer,
        default="adamw",
        metavar="NAME",
        help='of torch.optim, or "none"; default: adamw',
    )
    add(
        "--device",
        help='a card ("RTX 3090", see "memscale cards") or a torch device; '
        "default: this machine's accelerator, else cpu",
    )
    add(
        "--set",
        action="append",
        default=[],
        type=_assignment,
        metavar="KEY=VALUE",
        dest="overrides",
        help="change the configuration of a model known by name: n_layer=24",
    )
    add("--dtype", choices=_DTYPES, help="of the parameters and the inputs")
    add("--json", action="store_true", help="print JSON and nothing else")
    add(
        "--check-fits",
        action="store_true",
        help="exit with status 3 if it does not fit the device",
    )
    add("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=_estimate)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _optimizer(text: str) -> str | None:
    name = text.lower()
    if name == "none":
        return None
    names = sorted(optimizer_names())
    if name not in names:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(names)} or none, got {text!r}"
        )
    return name


def _assignment(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, {"true": True, "false": False}.get(value.lower(), value)


# ---- estimate ----


def _estimate(options: argparse.Namespace) -> int:
    # "loss_type was set": said of every model that is built from a configuration.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    device = options.device or _default_device()
    # Before anything slow.
    spec = _card(device) if options.check_fits else None
    with contextlib.redirect_stdout(sys.stderr):  # models may print
        subject, estimate = _make(options, device)
    fit = None if spec is None else estimate.fits(spec)
    if options.json:
        print(_json(options, estimate, fit))
    else:
        print(subject.title)
        if options.device is None:
            print(f"For {device}, what this machine has; --device chooses another.")
        print(f"\n{estimate}")
    if fit is None or fit.fits:
        return 0
    if not options.json:
        excess = format_bytes(fit.needed - fit.capacity)
        print(f"\nDoes not fit {estimate.target}: {excess} too much.")
    return 3


def _json(options: argparse.Namespace, estimate: Estimate, fit: Fit | None) -> str:
    fields = {"model": options.model, **estimate.to_dict()}
    if fit is not None:
        names = ("fits", "needed", "reserve", "capacity")
        fields["fit"] = {name: getattr(fit, name) for name in names}
    return json.dumps(fields, indent=2)


def _default_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _card(device: str) -> hardware.DeviceSpec:
    """What ``--check-fits`` compares with."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        return hardware.find(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != kind:
        raise UsageError(f"--check-fits needs a card as --device, got {device!r}")
    return hardware.detect().devices[torch.device(device).index or 0]


def _make(options: argparse.Namespace, device: str) -> tuple[Subject, Estimate]:
    find = _from_factory if ":" in options.model else _from_name
    subject = find(options)
    if options.dtype is not None:
        _convert(subject, _DTYPES[options.dtype])
    estimate = memscale.estimate(
        subject.model,
        subject.sample,
        options.optimizer,
        loss_fn=subject.loss_fn,
        device=device,
        batch=options.batch or memscale.estimator.DEFAULT_BATCH,
        length=options.seq or memscale.estimator.DEFAULT_LENGTH,
    )
    return subject, estimate


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
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UsageError(f"module {module_name!r} has no function {name!r}")
    made: Callable[[], Any] = factory
    return made


def _call_factory(factory: Callable[[], Any]) -> Any:
    """On meta, where weights cost nothing; plainly if that does not work."""
    try:
        with torch.device("meta"):
            return factory()
    except Exception:
        return factory()


# ---- lists ----


def _list_models(options: argparse.Namespace) -> int:
    rows = [("model", "batch", "seq", "what it is")]
    rows += [
        (entry.name, str(entry.batch), str(entry.seq), entry.description)
        for entry in BENCHMARK_MODELS.values()
    ]
    print(table(rows, "<>><"))
    return 0


def _list_cards(options: argparse.Namespace) -> int:
    rows = [("card", "memory", "architecture")]
    rows += [(card.name, _memory(card), card.architecture) for card in hardware.known()]
    print(table(rows, "<><"))
    return 0


def _memory(card: hardware.DeviceSpec) -> str:
    if card.memory is None:
        raise HardwareError(f"the memory of {card.name} is unknown")
    return format_bytes(card.memory)
