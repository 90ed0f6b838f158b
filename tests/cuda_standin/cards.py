"""The cards that the stand-in can show, from MemScale's own table of devices."""

from __future__ import annotations

from memscale import hardware

# Multiprocessors, from public data sheets: MemScale's table has no use for them.
NUM_MULTIPROCESSORS = {
    "T4": 40,
    "RTX 2080 Ti": 68,
    "RTX 3060": 28,
    "RTX 3090": 82,
    "RTX 4090": 128,
    "RTX 5090": 170,
    "A100 40GB": 108,
    "A100 80GB": 108,
    "H100 SXM": 132,
}


def environment(name: str, *, devices: int = 1) -> dict[str, str]:
    """What a process must find in its environment to see ``devices`` such cards."""
    spec = hardware.find(name)
    major, minor = spec.compute_capability
    words = [
        f"{spec.vendor} {spec.name}",
        f"{major}.{minor}",
        str(spec.memory),
        str(NUM_MULTIPROCESSORS[spec.name]),
    ]
    return {"STANDIN_CARD": ";".join(words), "STANDIN_DEVICES": str(devices)}
