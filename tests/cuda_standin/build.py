"""Puts MemScale together for the CUDA build of torch, from what is compiled already.

    python build.py --torch .venv/…/torch --cuda-torch .venv-cuda/…/torch
        --dev build/dev --kernels build/cuda-compile/…/libmemscale_kernels.a
        --out build/cuda-standin

The CPU and the CUDA build of one version of torch come with the same headers (which
is checked), so that the objects of build/dev are those that a build beside the CUDA
torch would compile, but for MemScale's own CUDA kernels. Two packages are made, each
a folder for PYTHONPATH with the Python files as links:
  with_kernels     _C linked again, with the CUDA kernels in place of their absence
  without_kernels  _C as build/dev has it: a build without nvcc
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shlex
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "python/memscale"
# Headers that differ between the two builds of torch and that no file of ours
# includes.
MAY_DIFFER = {"caffe2/core/macros.h"}


def check_headers(cpu: Path, cuda: Path) -> None:
    """Ends the program if objects compiled beside one torch may not suit the other."""
    names = {p.relative_to(cpu).as_posix() for p in cpu.rglob("*.h")} - MAY_DIFFER
    differ = [n for n in sorted(names) if not _same(cpu / n, cuda / n)]
    if differ:
        sys.exit(
            "the CPU and the CUDA build of torch have different headers, so that "
            f"build/dev does not suit both: {', '.join(differ[:5])}"
        )


def _same(a: Path, b: Path) -> bool:
    return b.exists() and filecmp.cmp(a, b, shallow=False)


def link_with_kernels(dev: Path, kernels: Path, cuda_lib: Path, out: Path) -> None:
    """build/dev's own link of _C, with another library of kernels and the runtime."""
    commands = subprocess.run(
        ["ninja", "-C", dev, "-t", "commands", "_C"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    words = shlex.split(commands.strip().splitlines()[-1])
    words = [w for w in words if w not in (":", "&&")]
    words[words.index("-o") + 1] = str(out)
    without = "src/memscale/kernels/libmemscale_kernels.a"
    at = words.index(without)
    words[at : at + 1] = [str(kernels), str(cuda_lib / "libcudart.so.13")]
    subprocess.run(words, check=True, cwd=dev)


def make_package(folder: Path, modules: dict[str, Path]) -> None:
    """A package of links: to the Python files, and to the modules given by name."""
    package = folder / "memscale"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {p.name: p for p in SOURCE.iterdir() if p.name != "__pycache__"}
    wanted |= modules
    for link in package.iterdir():
        if link.is_symlink() and link.name not in wanted:
            link.unlink()
    for name, target in wanted.items():
        link = package / name
        if not link.exists() or link.is_symlink():
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(target, package))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", type=Path, required=True)
    parser.add_argument("--cuda-torch", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--kernels", type=Path, help="leave out if there is no nvcc")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    check_headers(args.torch / "include", args.cuda_torch / "include")
    built = args.dev.resolve() / "src/memscale"
    modules = {p.name: p for p in (built / "bindings").glob("_*.so")}
    hostmem = built / "hostmem/libmemscale_hostmem.so"
    modules[hostmem.name] = hostmem
    make_package(args.out / "without_kernels", modules)
    if args.kernels is None:
        return
    extension = next(name for name in modules if name.startswith("_C."))
    linked = args.out.resolve() / extension
    cuda_lib = args.cuda_torch.resolve().parent / "nvidia/cu13/lib"
    link_with_kernels(args.dev, args.kernels.resolve(), cuda_lib, linked)
    make_package(args.out / "with_kernels", modules | {extension: linked})


if __name__ == "__main__":
    main()
