"""What a user can say: ``Config``, its modes, and the fields' documentation.

Fields, defaults, rules and sentences come from one table in C++. ``markdown()``
gives it as the tables of docs/config.md.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from memscale._C import (
    AsyncOffloadConfig,
    Config,
    ConfigError,
    EffectiveConfig,
    FieldSpec,
    OptimizationMode,
    format_bytes,
    parse_bytes,
)

__all__ = [
    "AsyncOffloadConfig",
    "Config",
    "EffectiveConfig",
    "FieldSpec",
    "OptimizationMode",
    "add_arguments",
    "format_bytes",
    "from_arguments",
    "markdown",
    "parse_bytes",
]

_DOCS: dict[type[Config] | type[AsyncOffloadConfig], str] = {
    Config: "What MemScale may do to a model, and within which limits.",
    AsyncOffloadConfig: "How activations travel to the host and back.",
}


def _describe(cls: type[Config] | type[AsyncOffloadConfig], summary: str) -> None:
    """Give the class the signature and the docstring that its table implies."""
    fields = cls.fields()
    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default
        )
        for field in fields
    ]
    described: Any = cls
    described.__signature__ = inspect.Signature(parameters)
    lines = [f"{f.name}: {f.type} = {f.default_text}\n    {f.doc}" for f in fields]
    described.__doc__ = "\n".join([summary, "", *lines])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option a field to ``parser``: ``--budget``, ``--mode``, ...

    Names, help, defaults and rules come from the table; values are checked when
    they are parsed. Fields that are configs of their own have no option.
    """
    group = parser.add_argument_group("MemScale")
    for field in Config.fields():
        if field.type.startswith("record"):
            continue
        option = "--" + field.name.replace("_", "-")
        text = f"{field.doc} Must be {field.rule}; default: {field.default_text}."
        reader = _reader(field)
        # argparse reads "%" as a format.
        group.add_argument(
            option,
            default=argparse.SUPPRESS,
            type=reader,
            help=text.replace("%", "%%"),
            metavar=field.type.split(" ")[0].upper(),
        )


def from_arguments(arguments: argparse.Namespace) -> Config:
    """The config that the options of :func:`add_arguments` describe."""
    given = vars(arguments)
    names = [field.name for field in Config.fields()]
    return Config.from_dict({name: given[name] for name in names if name in given})


def _reader(field: FieldSpec) -> Callable[[str], Any]:
    """Reads the text of one option, by the rule of its field."""
    readers: dict[str, Callable[[str], Any]] = {
        "bool": lambda text: {"true": True, "false": False}.get(text.lower(), text),
        "int": int,
        "float": float,
    }
    read = readers.get(field.type.split(" ")[0], str)

    def check(text: str) -> Any:
        try:
            value = read(text)
        except ValueError:
            value = text
        try:
            Config.from_dict({field.name: value})
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return check


def markdown() -> str:
    """The tables of docs/config.md."""
    sections = [_modes_table()]
    for cls, summary in _DOCS.items():
        sections.append(f"## {cls.__name__}\n\n{summary}\n\n{_fields_table(cls)}")
    return "\n\n".join(sections)


def _fields_table(cls: type[Config] | type[AsyncOffloadConfig]) -> str:
    rows = ["| field | default | must be | |", "|---|---|---|---|"]
    for field in cls.fields():
        default = f"`{field.default_text}`" + (" (by mode)" if field.by_mode else "")
        rows.append(f"| `{field.name}` | {default} | {field.rule} | {field.doc} |")
    return "\n".join(rows)


def _modes_table() -> str:
    modes = list(OptimizationMode)
    effective = [Config(mode=mode).resolve() for mode in modes]
    rows = [
        "| | " + " | ".join(f"`{mode.value}`" for mode in modes) + " |",
        "|---|" + "---|" * len(modes),
    ]
    for field in Config.fields():
        if field.by_mode:
            cells = ["on" if getattr(e, field.name) else "off" for e in effective]
            rows.append(f"| `{field.name}` | " + " | ".join(cells) + " |")
    limits = [_percent(e.slowdown_limit) for e in effective]
    rows.append(
        "| slower than the plain step by at most | " + " | ".join(limits) + " |"
    )
    stops = ["yes" if e.stops_at_knee else "no" for e in effective]
    rows.append(
        "| less where it buys too little ([knee](plans.md#the-knee)) | "
        + " | ".join(stops)
        + " |"
    )
    return "## Modes\n\n" + "\n".join(rows)


def _percent(limit: float | None) -> str:
    return "no limit" if limit is None else f"{limit:.0%}"


for _cls, _summary in _DOCS.items():
    _describe(_cls, _summary)
