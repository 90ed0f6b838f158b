"""A technique is a module: its name stands in its own files, and in few others.

Each technique has words by which it would be named elsewhere. A file that has one, and
is neither of the technique's module nor on the list of files that name all techniques
to users, is an error here: see docs/adding-a-technique.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from memscale._C import technique_names

_ROOT = Path(__file__).parent.parent.parent
_SOURCES = ("src/memscale", "python/memscale")
_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".inc", ".py", ".pyi"}

# Files that name techniques because users do: fields, attributes of plans, files.
_PUBLIC = (
    "src/memscale/core/config/config.*",  # fields
    "src/memscale/core/plan/plan_json.cpp",  # files of version 1
    "src/memscale/core/techniques/table.*",
    "src/memscale/bindings/bind_core.cpp",  # fields
    "src/memscale/bindings/bind_decision.cpp",  # attributes of plans
    "python/memscale/_C.pyi",
    "python/memscale/api.py",  # apply_all_optimizations, the docs of wrap
    "python/memscale/techniques/table.py",
    "python/memscale/techniques/__init__.py",
    "python/memscale/benchmarks/*",
)


@dataclass(frozen=True)
class Words:
    """How a technique is named, and where it may be."""

    pattern: str
    module: tuple[str, ...]


_TECHNIQUES = {
    "optimizer_state": Words(
        r"8bit|8_bit|eight_bit|optimizer_bits|quantise(?!d)",
        (
            "src/memscale/core/techniques/optimizer_state.*",
            "src/memscale/kernels/*",
            "src/memscale/runtime/optimizer/*",
            "src/memscale/bindings/bind_runtime.cpp",  # of the kernels
            "python/memscale/techniques/optimizer_state.py",
            "python/memscale/optim/*",
            # What would help after an out-of-memory error.
            "python/memscale/estimation/oom_options.py",
        ),
    ),
    "use_cache": Words(
        r"use_cache|forget_cache",
        (
            "src/memscale/core/techniques/use_cache.cpp",
            "python/memscale/techniques/use_cache.py",
        ),
    ),
    # "Replay" and "recompute" are the runtime's own words; what must not leak is the
    # planner's: the rule, the field, the choices.
    "recompute": Words(
        r"recompute_layers|enable_checkpointing|kRecompute|techniques[./]recompute",
        (
            "src/memscale/core/techniques/recompute.cpp",
            # Its choices are rules of tapes, which the planner searches.
            "src/memscale/core/plan/tape_choice.*",
            "src/memscale/core/plan/plan.cpp",
            "python/memscale/techniques/recompute.py",
        ),
    ),
}


def _files() -> list[str]:
    return [
        path.relative_to(_ROOT).as_posix()
        for source in _SOURCES
        for path in sorted((_ROOT / source).rglob("*"))
        if path.suffix in _SUFFIXES
    ]


def _naming(pattern: str) -> list[str]:
    """Files in whose text or path the pattern is."""
    found = re.compile(pattern, re.IGNORECASE)
    return [
        name
        for name in _files()
        if found.search(name) or found.search((_ROOT / name).read_text("utf-8"))
    ]


def _may(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def test_every_technique_has_its_words() -> None:
    assert set(_TECHNIQUES) == set(technique_names())


@pytest.mark.parametrize("technique", _TECHNIQUES)
def test_a_technique_is_named_in_its_own_files(technique: str) -> None:
    words = _TECHNIQUES[technique]
    naming = _naming(words.pattern)
    leaked = [name for name in naming if not _may(name, words.module + _PUBLIC)]
    assert leaked == []
    # And no pattern is left over from a file that is gone.
    unused = [p for p in words.module if not any(fnmatch(name, p) for name in naming)]
    assert unused == []
