"""Includes may only point down: base <- core, hostmem, simdev <- runtime <- bindings;
kernels stand alone, under runtime. No two headers define a type of the same name.

Exits with status 1 and a line per offence.
"""

from __future__ import annotations

import re
import sys
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


def offences(source_root: Path) -> list[str]:
    """One line for each include that its file may not have."""
    found = []
    for path in sorted(source_root.rglob("*")):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"}:
            continue
        name = path.relative_to(source_root).as_posix()
        layer = name.split("/")[0]
        for include in INCLUDE.findall(path.read_text()):
            target = include.removeprefix("memscale/").split("/")[0]
            ours = include.startswith("memscale/")
            if ours and target != layer and target not in ALLOWED[layer]:
                found.append(f"{name}: layer {layer} may not include {include}")
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


def main() -> int:
    root = Path(__file__).parent.parent / "src" / "memscale"
    found = offences(root) + same_names(root)
    print("\n".join(found) if found else "layers: all includes point down")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
