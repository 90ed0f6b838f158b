"""Writes stand-ins for the CUDA libraries that a CUDA build of torch needs.

    python generate.py --python .venv-cuda/bin/python --cuda-include DIR

A shared object for each, with every symbol that torch's own objects want from it,
in the symbol version that they want it in: written by hand where the answer matters
(runtime/ for the CUDA runtime, libraries/ for the others), else generated
(answers.py). They go where torch looks for them first, site-packages/nvidia/cu13/lib.
Nothing of torch is changed.
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import answers

HERE = Path(__file__).resolve().parent
RUNTIME = "libcudart.so.13"
DRIVER = "libcuda.so.1"
MANAGEMENT = "libnvidia-ml.so.1"

# Libraries of symbols that come without a version, by how their names begin: the
# first that fits.
UNVERSIONED = {
    "cusparseLt": "libcusparseLt.so.0",
    "cuFile": "libcufile.so.0",
    "nccl": "libnccl.so.2",
    "nvshmem": "libnvshmem_host.so.3",
    "curand": "libcurand.so.10",
    "cudnn": "libcudnn.so.9",
    "cu": DRIVER,
}

# symbol -> its version, or none
Symbols = dict[str, str | None]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def wanted_by(path: Path) -> dict[str, Symbols]:
    """What one of torch's objects wants from CUDA's libraries."""
    wanted: dict[str, Symbols] = collections.defaultdict(dict)
    for library in re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", path)):
        if library in answers.LIBRARIES:
            wanted[library] = {}
    library_of = {}  # by version
    for needs in re.split(r"Version: 1  File: ", run("readelf", "-VW", path))[1:]:
        for version in re.findall(r"Name: (\S+)", needs):
            library_of[version] = needs.split()[0]
    undefined = run("nm", "-D", "--undefined-only", "--with-symbol-versions", path)
    for line in undefined.splitlines():
        symbol, _, version = line.split()[-1].replace("@@", "@").partition("@")
        library = library_of.get(version) if version else unversioned(symbol)
        if library in answers.LIBRARIES:
            wanted[library][symbol] = version or None
    return wanted


def unversioned(symbol: str) -> str | None:
    for begin, library in UNVERSIONED.items():
        if re.match(begin + r"[A-Za-z_]", symbol):
            return library
    return None


def by_name(torch: Path) -> dict[str, Symbols]:
    """What torch looks up at run time, as its header lists it."""
    text = (torch / "include/c10/cuda/driver_api.h").read_text()
    names = re.findall(r"_\((cu\w+|nvml\w+)", text)
    return {
        DRIVER: {n: None for n in names if n.startswith("cu")},
        MANAGEMENT: {n: None for n in names if n.startswith("nvml")},
    }


def wanted(torch: Path) -> dict[str, Symbols]:
    total: dict[str, Symbols] = collections.defaultdict(dict)
    for path in sorted((torch / "lib").glob("*.so*")):
        for library, symbols in wanted_by(path).items():
            total[library] |= symbols
    for library, symbols in by_name(torch).items():
        total[library] = symbols | total[library]
    return total


def sources_of(library: str) -> list[Path]:
    if library == RUNTIME:
        return sorted(HERE.glob("runtime/*.cpp"))
    name = library.removeprefix("lib").partition(".so")[0]
    return list(HERE.glob(f"libraries/{name}.cpp"))


def compiled(source: Path, cuda_include: Path, folder: Path) -> Path:
    out = folder / (source.stem + ".o")
    flags = ["-std=c++20", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    run("g++", *flags, "-isystem", cuda_include, "-c", source, "-o", out)
    return out


def defined_in(objects: list[Path]) -> set[str]:
    """C functions only: other names begin as C++ mangles them."""
    lines = [
        line
        for path in objects
        for line in run("nm", "--defined-only", "-g", path).splitlines()
    ]
    names = {line.split()[-1] for line in lines if line.split()[-2] == "T"}
    return {name for name in names if not name.startswith("_Z")}


def version_script(symbols: Symbols, also: set[str]) -> str:
    """``also``: functions that torch does not name, in whatever version there is."""
    names = collections.defaultdict(set)
    for symbol, version in symbols.items():
        if version:
            names[version].add(symbol)
    if not names:
        return "{ global: *; };\n"
    names[next(iter(names))] |= also
    return "".join(
        f"{version} {{ global: {'; '.join(sorted(group))}; }};\n"
        for version, group in names.items()
    )


def make(library: str, symbols: Symbols, cuda_include: Path, out: Path) -> int:
    """Writes one library; the number of its functions that are written by hand."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        objects = [compiled(s, cuda_include, folder) for s in sources_of(library)]
        by_hand = defined_in(objects)
        (folder / "stubs.c").write_text(
            "void standin_called(const char*, int);\n"
            "void* standin_new_handle(void);\n"
            + "".join(answers.stub(library, s) for s in sorted(set(symbols) - by_hand))
        )
        (folder / "map").write_text(version_script(symbols, by_hand - set(symbols)))
        command: list[str | Path] = ["g++", "-shared", "-fPIC", "-o", out / library]
        command += [f"-Wl,-soname,{library}", f"-Wl,--version-script,{folder}/map"]
        run("gcc", "-O1", "-fPIC", "-w", "-c", folder / "stubs.c",
            "-o", folder / "stubs.o")  # fmt: skip
        command += [folder / "stubs.o", *objects]
        if library == RUNTIME:
            command += ["-ldl", "-lpthread"]
        else:
            command += ["-Wl,-rpath,$ORIGIN", out / RUNTIME]
        run(*command)
    return len(by_hand & set(symbols))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="of the CUDA build of torch")
    parser.add_argument("--cuda-include", required=True, type=Path)
    args = parser.parse_args()
    # Asked of the finder: torch cannot be imported before the libraries are there.
    find = "import importlib.util as u; print(u.find_spec('torch').origin)"
    torch = Path(run(args.python, "-c", find).strip()).parent
    out = torch.parent / "nvidia/cu13/lib"
    out.mkdir(parents=True, exist_ok=True)
    libraries = wanted(torch)
    num_symbols = num_by_hand = 0
    # The runtime first: the others link it.
    for library in sorted(libraries, key=lambda name: (name != RUNTIME, name)):
        num_symbols += len(libraries[library])
        num_by_hand += make(library, libraries[library], args.cuda_include, out)
    print(
        f"{len(libraries)} stand-in libraries of {num_symbols} functions, "
        f"{num_by_hand} of them written by hand"
    )


if __name__ == "__main__":
    main()
