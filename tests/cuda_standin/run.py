"""Makes what the suite here needs, each part only if it is out of date, and runs it.

    python tests/cuda_standin/run.py --torch torch==2.13.0 --if-missing pass -- [pytest]

Run by ``make test-cuda``, after build/dev and the CUDA kernels were built, with the
Python of .venv. The parts: .venv-cuda, with a CUDA build of torch and every other
package borrowed from .venv; the stand-in libraries (generate.py); MemScale beside that
torch (build.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv-cuda"
OUT = ROOT / "build/cuda-standin"
DEV = ROOT / "build/dev"
KERNELS = ROOT / "build/cuda-compile/src/memscale/kernels/libmemscale_kernels.a"
PYTHON = VENV / "bin/python"
PACKAGES = VENV / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
CUDA = "13"  # of which the stand-ins have the names and versions
HEADER_PACKAGES = [f"nvidia-cuda-runtime=={CUDA}.*", f"nvidia-cuda-crt=={CUDA}.*"]


def install(*arguments: str | Path) -> bool:
    """pip, from the package index: its configuration may name CPU builds of torch."""
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install"]
    options = ["--quiet", "--no-deps", "--progress-bar", "off"]
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    done = subprocess.run(
        [*pip, *options, *arguments], env=environment, capture_output=True, text=True
    )
    return done.returncode == 0


def call(*command: str | Path) -> None:
    if subprocess.run(command).returncode != 0:
        sys.exit(1)


def is_newer(stamp: Path, sources: Iterable[Path]) -> bool:
    """Whether ``stamp`` is there, and no older than any of the sources."""
    if not stamp.exists():
        return False
    made = stamp.stat().st_mtime
    return all(source.stat().st_mtime <= made for source in sources)


def has_torch(requirement: str) -> bool:
    """Makes .venv-cuda; false if there is no CUDA build to be had."""
    stamp = VENV / ".torch"
    if stamp.exists() and stamp.read_text() == requirement:
        return True
    shutil.rmtree(VENV, ignore_errors=True)
    call(sys.executable, "-m", "venv", VENV)
    if not install(requirement):
        return False
    version = (PACKAGES / "torch/version.py").read_text()
    if f"cuda: Optional[str] = '{CUDA}." not in version:
        return False
    ours = Path(importlib.util.find_spec("pytest").origin).parents[1]
    (PACKAGES / "shared.pth").write_text(f"{ours}\n")
    stamp.write_text(requirement)
    return True


def cuda_headers() -> Path:
    """The folder of nvcc's, or else of the packages that hold the headers only."""
    if nvcc := shutil.which("nvcc"):
        folder = Path(nvcc).resolve().parents[1] / "include"
        if (folder / "cuda_runtime_api.h").exists():
            return folder
    folder = OUT / "headers"
    include = folder / f"nvidia/cu{CUDA}/include"
    if not include.exists() and not install("--target", folder, *HEADER_PACKAGES):
        sys.exit("no CUDA headers: neither nvcc nor " + " ".join(HEADER_PACKAGES))
    return include


def make_libraries() -> None:
    stamp = VENV / ".standin"
    sources = [*HERE.glob("runtime/*"), *HERE.glob("libraries/*")]
    sources += [HERE / "generate.py", HERE / "answers.py", VENV / ".torch"]
    if is_newer(stamp, sources):
        return
    generate = [sys.executable, HERE / "generate.py", "--python", PYTHON]
    call(*generate, "--cuda-include", cuda_headers())
    stamp.touch()


def make_packages() -> None:
    stamp = OUT / ".made"
    kernels = [KERNELS] if KERNELS.exists() else []
    sources = [DEV / ".installed", HERE / "build.py", VENV / ".standin", *kernels]
    if is_newer(stamp, sources):
        return
    torch = Path(importlib.util.find_spec("torch").origin).parent
    build = [sys.executable, HERE / "build.py", "--torch", torch, "--dev", DEV]
    build += ["--cuda-torch", PACKAGES / "torch", "--out", OUT]
    call(*build, *(["--kernels", KERNELS] if kernels else []))
    stamp.touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True, help="what pip is asked for")
    parser.add_argument("--if-missing", choices=["pass", "fail"], required=True)
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    args = parser.parse_args()
    if not has_torch(args.torch):
        print(f"not run: the package index has no CUDA build of {args.torch}")
        sys.exit(1 if args.if_missing == "fail" else 0)
    make_libraries()
    make_packages()
    build = OUT / ("with_kernels" if KERNELS.exists() else "without_kernels")
    os.environ["CUDA_STANDIN_BUILDS"] = str(OUT)
    os.environ["PYTHONPATH"] = str(build)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    processes = ["-n", str(os.cpu_count()), "--dist", "loadfile"]
    tests = args.pytest or ["-q", *processes, str(HERE)]
    os.execv(PYTHON, [str(PYTHON), "-m", "pytest", *tests])


if __name__ == "__main__":
    main()
