"""Hardware from Python; tables and parsers are tested in C++."""

from __future__ import annotations

import pathlib
import types

import pytest
import torch

from memscale import _C, hardware

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_known_cards() -> None:
    cards = hardware.known()
    assert len(cards) >= 30
    assert {"RTX 3090", "A100 80GB", "H100 SXM"} <= {card.name for card in cards}


def test_find() -> None:
    card = hardware.find("nvidia geforce rtx 3090")
    assert card.memory == 24 << 30
    assert card.compute_capability == (8, 6)
    assert card.supports_bf16 is True
    assert set(card.sources.values()) == {"known"}
    assert repr(card) == "DeviceSpec(RTX 3090, 24.00 GiB)"
    assert hardware.find("RTX 4060 Ti", "16GiB").name == "RTX 4060 Ti 16GB"
    with pytest.raises(_C.HardwareError, match="did you mean RTX 3090"):
        hardware.find("RTX 309")


def test_detect_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    machine = hardware.detect()
    assert machine.devices == []
    assert 0 < machine.host.available_memory <= machine.host.total_memory
    assert machine.host.num_cores >= 1


def _pretend(
    monkeypatch: pytest.MonkeyPatch, kind: str, module: types.SimpleNamespace
) -> None:
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: torch.device(kind),
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)


def test_detect_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(
        name="NVIDIA GeForce RTX 3090", total_memory=25_300_000_000, major=8, minor=6
    )
    _pretend(
        monkeypatch,
        "cuda",
        types.SimpleNamespace(get_device_properties=lambda device: properties),
    )
    (device,) = hardware.detect().devices
    assert device.name == "NVIDIA GeForce RTX 3090"
    assert device.vendor == "NVIDIA"
    assert device.memory == 25_300_000_000
    assert device.half_flops == 71e12
    assert device.sources["memory"] == "detected"
    assert device.sources["supports_bf16"] == "detected"
    assert device.sources["half_flops"] == "known"


def test_detect_a_device_that_says_little(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(
        monkeypatch,
        "privateuseone",
        types.SimpleNamespace(mem_get_info=lambda device: (1 << 20, 8 << 30)),
    )
    (device,) = hardware.detect().devices
    assert device.memory == 8 << 30
    assert device.compute_capability is None
    assert device.half_flops is None
    assert device.sources["half_flops"] == "unknown"

    _pretend(monkeypatch, "privateuseone", types.SimpleNamespace())
    (device,) = hardware.detect().devices
    assert device.memory is None
    assert "memory unknown" in repr(device)


def test_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "MATMUL_SIZE", 64)
    monkeypatch.setattr(hardware, "COPY_BYTES", 1 << 16)
    card = hardware.find("RTX 3090")
    measured = hardware.measure_device(torch.device("cpu"), card)
    for figure in ("fp32_flops", "half_flops", "link_bandwidth"):
        assert measured.sources[figure] == "measured"
        assert getattr(measured, figure) > 0
    assert measured.sources["memory"] == "known"
    assert card.sources["fp32_flops"] == "known", "the original must not change"


def test_docs_hold_the_table() -> None:
    assert hardware.markdown() in (DOCS / "hardware.md").read_text(), (
        "docs/hardware.md is out of date: put the output of "
        "`tools/print_tables.py hardware` into it"
    )
