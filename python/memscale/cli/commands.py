"""The command ``memscale``.

::

    memscale estimate gpt2 --batch 4 --seq 512 --device "RTX 3090"
    memscale estimate gpt2 --device "RTX 3090" --budget 3GiB
    memscale estimate my_package.my_module:make_model --json
    memscale plan gpt2 --batch 8 --seq 512 --device "RTX 3090" --budget 6GiB
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
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import memscale
from memscale import hardware
from memscale._C import Fit, HardwareError, format_bytes
from memscale.benchmarks.models import BENCHMARK_MODELS
from memscale.cli import plan
from memscale.cli.models import DTYPES, Subject, UsageError, find_subject
from memscale.config import Config
from memscale.estimation.estimate import Estimate
from memscale.report.tables import table
from memscale.trace.optimizer_step import optimizer_names
from memscale.trace.training_step import DEFAULT_BATCH, DEFAULT_LENGTH

__all__ = ["main"]


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
        prog="memscale",
        description="How many bytes a training step needs, and how it needs fewer.",
    )
    version = f"memscale {memscale.__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_estimate(commands)
    _add_plan(commands)
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
    _add_subject(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON and nothing else")
    plan.add_wishes(parser, default=None)
    add(
        "--check-fits",
        action="store_true",
        help="exit with status 3 if it does not fit the device",
    )
    parser.set_defaults(run=_estimate)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="decide what each layer keeps and what it recomputes",
        description="Decide what each layer keeps and what it recomputes in backward, "
        "without running it.",
    )
    _add_subject(parser)
    plan.add_options(parser)
    parser.set_defaults(run=_plan)


def _add_subject(parser: argparse.ArgumentParser) -> None:
    """A model, its batch, its optimizer and the device."""
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
    add("--dtype", choices=DTYPES, help="of the parameters and the inputs")
    add("--debug", action="store_true", help="show tracebacks")


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


# ---- estimate, plan ----


def _estimate(options: argparse.Namespace) -> int:
    device = options.device or _default_device()
    # Before anything slow.
    spec = _card(device) if options.check_fits else None
    with _quiet():
        subject = find_subject(options)
        estimate = memscale.estimate(
            subject.model,
            subject.sample,
            options.optimizer,
            _wished(options),
            subject.loss_fn,
            device=device,
            **_sizes(options),
        )
    fit = None if spec is None else estimate.fits(spec)
    if options.json:
        print(_json(options, estimate, fit))
    else:
        _print_title(options, subject, device)
        print(f"\n{estimate}")
    if fit is None or fit.fits:
        return 0
    if not options.json:
        excess = format_bytes(fit.needed - fit.capacity)
        print(f"\nDoes not fit {estimate.target}: {excess} too much.")
    return 3


def _wished(options: argparse.Namespace) -> Config | None:
    """None: the plain step."""
    given = {"budget": options.budget, "mode": options.mode}
    wishes = {name: value for name, value in given.items() if value is not None}
    return Config.from_dict(wishes) if wishes else None


def _plan(options: argparse.Namespace) -> int:
    plan.check_options(options)
    device = options.device or _default_device()
    with _quiet():
        subject = find_subject(options)
        plans = plan.make(options, subject, device=device, **_sizes(options))
    if not options.json:
        _print_title(options, subject, device)
        print()
    plan.show(options, plans)
    return 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Models may print: only what was asked for goes to stdout."""
    # "loss_type was set": said of every model that is built from a configuration.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _print_title(options: argparse.Namespace, subject: Subject, device: str) -> None:
    print(subject.title)
    if options.device is None:
        print(f"For {device}, what this machine has; --device chooses another.")


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "batch": options.batch or DEFAULT_BATCH,
        "length": options.seq or DEFAULT_LENGTH,
    }


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
