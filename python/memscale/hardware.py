"""The machine: what its accelerators and its host can do.

``detect()`` describes this machine; ``find("RTX 3090")`` describes a card that
need not be in it. Each figure says where it comes from: the built-in table
(``known``), the driver (``detected``) or a timing on this machine (``measured``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from memscale import _C
from memscale._C import DeviceSpec, Hardware, HostSpec, format_bytes

__all__ = [
    "DeviceSpec",
    "Hardware",
    "HostSpec",
    "detect",
    "find",
    "known",
    "markdown",
    "measure_device",
]

# Large enough to hide the cost of a launch, small enough for any card.
MATMUL_SIZE = 2048
COPY_BYTES = 64 << 20
_REPEATS = 5


def known() -> list[DeviceSpec]:
    """The cards of the built-in table."""
    return _C.known_devices()


def find(name: str, memory: int | str | None = None) -> DeviceSpec:
    """The card of that name; ``memory`` tells cards of one name apart."""
    return _C.find_device(name, None if memory is None else _C.parse_bytes(memory))


def detect(measure: bool = False) -> Hardware:
    """This machine. ``measure`` also times each device, for about a second."""
    devices = [
        _detect_device(torch.device(kind, index)) for kind, index in _accelerators()
    ]
    if measure:
        devices = [
            measure_device(torch.device(kind, index), spec)
            for spec, (kind, index) in zip(devices, _accelerators(), strict=True)
        ]
    return Hardware(devices, _C.detect_host())


def _accelerators() -> list[tuple[str, int]]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    kind = accelerator.type
    return [(kind, index) for index in range(torch.accelerator.device_count())]


def _detect_device(device: torch.device) -> DeviceSpec:
    """Ask the device's own module; what it does not offer stays unknown."""
    module = torch.get_device_module(device)
    properties = _try(lambda: module.get_device_properties(device))
    capability = None
    if device.type == "cuda" and torch.version.hip is None:
        capability = (properties.major, properties.minor)
    name = getattr(properties, "name", None)
    if name is None:
        name = _try(lambda: module.get_device_name(device)) or device.type
    memory = getattr(properties, "total_memory", None)
    if memory is None:
        memory = (_try(lambda: module.mem_get_info(device)) or (None, None))[1]
    return _C.detected_device(
        name,
        vendor=_vendor(device),
        memory=memory,
        compute_capability=capability,
        supports_bf16=None if capability is None else capability >= (8, 0),
    )


def _vendor(device: torch.device) -> str:
    if device.type == "cuda":
        return "NVIDIA" if torch.version.hip is None else "AMD"
    return {"xpu": "Intel", "mps": "Apple"}.get(device.type, "")


def _try(ask: Callable[[], Any]) -> Any:
    # Device modules differ in what they offer and in how they say no.
    try:
        return ask()
    except (AttributeError, NotImplementedError, RuntimeError, AssertionError):
        return None


def measure_device(device: torch.device, spec: DeviceSpec) -> DeviceSpec:
    """``spec`` with matmul rates and link speed as timed on ``device``.

    Matmuls of two square matrices of side ``MATMUL_SIZE`` in fp32 and in half
    precision, and copies of ``COPY_BYTES`` bytes from pinned host memory.
    """
    half = torch.float16 if spec.supports_bf16 is False else torch.bfloat16
    host = torch.empty(COPY_BYTES, dtype=torch.uint8)
    pinned = _try(host.pin_memory)
    if pinned is not None:
        host = pinned
    # A device too full to be timed keeps the figures that it had.
    return spec.measured(
        fp32_flops=_try(lambda: _matmul_rate(torch.float32, device)),
        half_flops=_try(lambda: _matmul_rate(half, device)),
        link_bandwidth=_try(lambda: _copy_rate(host, device)),
    )


def _copy_rate(host: torch.Tensor, device: torch.device) -> float:
    there = torch.empty_like(host, device=device)
    seconds = _seconds(lambda: there.copy_(host, non_blocking=True), device)
    return host.nbytes / seconds


def _matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    a = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device=device)
    return 2 * MATMUL_SIZE**3 / _seconds(lambda: a @ a, device)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The fastest of a few runs: the others were disturbed."""
    best = float("inf")
    for _ in range(_REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def markdown() -> str:
    """The table of docs/hardware.md."""
    rows = [
        "| card | architecture | memory | GB/s | fp32 TFLOP/s | TF32 TFLOP/s "
        "| half TFLOP/s | bf16 | link GB/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for d in known():
        cells = [
            d.name,
            d.architecture + _version(d),
            format_bytes(d.memory or 0),
            f"{(d.memory_bandwidth or 0) / 1e9:.0f}",
            f"{(d.fp32_flops or 0) / 1e12:.1f}",
            "no" if d.tf32_flops is None else f"{d.tf32_flops / 1e12:.1f}",
            f"{(d.half_flops or 0) / 1e12:.1f}",
            "yes" if d.supports_bf16 else "no",
            f"{(d.link_bandwidth or 0) / 1e9:.0f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _version(device: DeviceSpec) -> str:
    capability = device.compute_capability
    return "" if capability is None else f" {capability[0]}.{capability[1]}"
