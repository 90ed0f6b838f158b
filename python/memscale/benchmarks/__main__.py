"""``python -m memscale.benchmarks <name> [--quick] [--check] [--json FILE]``."""

from __future__ import annotations

import os

# Some virtual machines advertise AMX and trap its use; torch's bf16 matmul would
# die there. Torch is imported by now, but oneDNN reads it when it is first used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Models are built from configurations: nothing is to be fetched, or remarked on.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import argparse
import importlib
import sys

from memscale.benchmarks import goals

# Each is a module with ``run(quick: bool) -> goals.Report``.
BENCHMARKS = {
    "budget": "plans under a byte budget beside uniform checkpointing: bytes and time",
    "optimizer": "8-bit and fp32 AdamW beside torch's and others: time and bytes",
    "overhead": "a tiny model wrapped beside eager: time per call, layer and op",
    "predict": "predicted against measured peaks, and what predicting costs",
    "recompute": "replay against plain training and checkpointing: bytes and time",
}


def _listing() -> str:
    width = max(map(len, BENCHMARKS))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in BENCHMARKS.items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m memscale.benchmarks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"benchmarks:\n{_listing()}",
    )
    parser.add_argument("name", nargs="?", help="which benchmark")
    goals.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.name not in BENCHMARKS:
        wrong = f"no benchmark named {options.name!r}" if options.name else "no name"
        print(f"{parser.prog}: {wrong}; there are:\n{_listing()}", file=sys.stderr)
        return 2
    if options.json is not None and not options.json.parent.is_dir():
        # Said now, not after minutes of measuring.
        parser.error(f"--json: no directory {options.json.parent}")
    module = importlib.import_module(f"memscale.benchmarks.{options.name}")
    return goals.finish(module.run(quick=options.quick), options)


if __name__ == "__main__":
    sys.exit(main())
