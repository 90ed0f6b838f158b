"""Includes and imports may only point down.

- C++ layers: base <- core, hostmem, simdev <- runtime <- bindings; kernels stand alone,
  under runtime. Rooms (folders) of core and of runtime: in the order below.
- Python rooms (sub-packages, and the modules beside them): in the order below, imports
  for type checkers included. No module needs itself through others.
- No two headers define a type of the same name; no file of a Python room has a name
  that begins with an underscore.

Exits with status 1 and a line per offence.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Which of our layers each layer may include, besides itself.
ALLOWED = {
    "base": set(),
    "core": {"base"},
    "hostmem": {"base"},
    "kernels": set(),
    "runtime": {"base", "core", "hostmem", "kernels"},
    "simdev": {"base", "hostmem"},
    "bindings": {"base", "core", "hostmem", "runtime", "simdev"},
}
# The rooms of a layer, lowest first: each may include those before it.
ROOMS = {
    "core": (
        "json",
        "config",
        "hardware",
        "trace",
        "ops",
        "time",
        "tape",
        "predict",
        "cuts",
        "solver",
        "plan",
        "techniques",
        "session",
    ),
    "runtime": ("observe", "record", "replay", "optimizer"),
}
# The rooms of the Python package, lowest first. `_C` and `_simdev` are under all of
# them, `memscale` itself is above.
PYTHON_ROOMS = (
    "logs",
    "memory",
    "config",
    "hardware",
    "model",
    "calls",
    "optim",
    "simdev",
    "trace",
    "report",
    "estimation",
    "replay",
    "techniques",
    "planning",
    "attach",
    "verify",
    "api",
    "__init__",
    "benchmarks",
    "cli",
    "__main__",
)
COMPILED = {"_C", "_simdev"}

TORCH_FREE = {"base", "core", "kernels"}
TORCH_FREE_FILES = {"simdev/heap.h", "simdev/heap.cpp"}
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
BANNED = {"torch/extension.h", "torch/torch.h", "torch/all.h", "ATen/ATen.h"}
# Types at the level of a namespace, not specialisations.
TYPE = re.compile(
    r"^(?:struct|class|enum class) (\w+)(?: final)?(?:\s*:[^;{<]*)?\s*\{", re.M
)
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.M)
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


# ---- C++ ----


def _place_offence(name: str) -> str | None:
    """A file that is in no layer, or in no room of its layer."""
    layer, room, *_ = name.split("/")
    if layer not in ALLOWED:
        return f"{name}: {layer} is no layer"
    if layer in ROOMS and room not in ROOMS[layer]:
        return f"{name}: {layer}/{room} is no room of {layer}"
    return None


def _room_offence(name: str, include: str) -> str | None:
    """Between two files of one layer."""
    layer = name.split("/")[0]
    if layer not in ROOMS:
        return None
    here, there = (path.split("/")[1] for path in (name, include))
    if there not in ROOMS[layer]:
        return f"{name}: includes {include}, which is in no room of {layer}"
    if ROOMS[layer].index(there) > ROOMS[layer].index(here):
        return f"{name}: {layer}/{here} may not include {layer}/{there}"
    return None


def offences(source_root: Path) -> list[str]:
    """One line for each include that its file may not have."""
    found = []
    for path in sorted(source_root.rglob("*")):
        if path.suffix not in {".h", ".hpp", ".cpp", ".inc", ".cu", ".cuh"}:
            continue
        name = path.relative_to(source_root).as_posix()
        layer = name.split("/")[0]
        misplaced = _place_offence(name)
        if misplaced:
            found.append(misplaced)
            continue
        for include in INCLUDE.findall(path.read_text()):
            if ".." in include.split("/"):
                found.append(f"{name}: {include} must begin with memscale/")
            target = include.removeprefix("memscale/")
            target_layer = target.split("/")[0]
            ours = include.startswith("memscale/")
            if ours and target_layer not in {layer, *ALLOWED[layer]}:
                found.append(f"{name}: layer {layer} may not include {include}")
            if ours and target_layer == layer:
                upward = _room_offence(name, target)
                found += [upward] if upward else []
            torch_free = layer in TORCH_FREE or name in TORCH_FREE_FILES
            if torch_free and TORCH.match(include):
                found.append(f"{name}: torch-free, may not include {include}")
            if include in BANNED:
                found.append(f"{name}: {include} costs 12 to 41 s a file")
            if "pybind" in include and layer != "bindings":
                found.append(f"{name}: pybind belongs to bindings/")
    return found


def same_names(source_root: Path) -> list[str]:
    """One line for each type that two headers define: the linker would mix them up."""
    headers: dict[tuple[str, str], list[str]] = {}
    for path in sorted(source_root.rglob("*.h")):
        text = path.read_text()
        for match in TYPE.finditer(text):
            spaces = NAMESPACE.findall(text[: match.start()])
            key = (spaces[-1] if spaces else "", match[1])
            headers.setdefault(key, []).append(path.relative_to(source_root).as_posix())
    return [
        f"{name} is defined in {' and in '.join(files)}: two types, one name"
        for (_, name), files in headers.items()
        if len(set(files)) > 1
    ]


# ---- Python ----


def _module_of(path: Path, package_root: Path) -> str:
    """ "trace.shell", "trace" for its __init__, "__init__" for the package itself."""
    parts = path.relative_to(package_root).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


_FOR_TYPES = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _imports(tree: ast.Module, modules: set[str]) -> Iterator[tuple[str, bool]]:
    """Modules of ours that a file names, and whether only for type checkers."""
    for_types: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in _FOR_TYPES:
            for_types.update(each for line in node.body for each in ast.walk(line))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full.removeprefix("memscale.") in modules | COMPILED
                names.append(full if is_module else node.module)
        for name in names:
            if name.split(".")[0] == "memscale":
                yield (
                    name.removeprefix("memscale").lstrip(".") or "__init__",
                    (node in for_types),
                )


def python_offences(package_root: Path) -> list[str]:
    """One line for each import that points up, for each cycle, for each _file."""
    paths = {_module_of(p, package_root): p for p in sorted(package_root.rglob("*.py"))}
    found = []
    needs: dict[str, set[str]] = {}
    for module, path in paths.items():
        name = path.relative_to(package_root).as_posix()
        here = module.split(".")[0]
        if here not in PYTHON_ROOMS:
            found.append(f"{name}: {here} is no room of the package")
            continue
        if path.stem.startswith("_") and not path.stem.startswith("__"):
            found.append(f"{name}: a room is private enough, no underscore")
        tree = ast.parse(path.read_text())
        if any(isinstance(n, ast.ImportFrom) and n.level > 0 for n in ast.walk(tree)):
            found.append(f"{name}: imports must begin with memscale")
        for target, for_types in _imports(tree, set(paths)):
            there = target.split(".")[0]
            if there in COMPILED:
                continue
            if there not in PYTHON_ROOMS:
                found.append(f"{name}: imports {target}, which is in no room")
            elif PYTHON_ROOMS.index(there) > PYTHON_ROOMS.index(here):
                found.append(f"{name}: {here} may not import {target}")
            elif not for_types and target != module:
                needs.setdefault(module, set()).add(target)
    return found + _cycles(needs)


def _cycles(needs: dict[str, set[str]]) -> list[str]:
    found = []
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            cycle = [*path[path.index(module) :], module]
            found.append(f"modules need each other: {' -> '.join(cycle)}")
        elif module not in done:
            for target in sorted(needs.get(module, ())):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(needs):
        visit(module, ())
    return found


def main() -> int:
    root = Path(__file__).parent.parent
    found = offences(root / "src" / "memscale") + same_names(root / "src" / "memscale")
    found += python_offences(root / "python" / "memscale")
    print("\n".join(found) if found else "layers: all includes and imports point down")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
