"""The stand-in itself: what the other tests here rely on."""

from __future__ import annotations

import pytest
import standin
import torch
from torch import nn

from memscale import hardware

MIB = 1 << 20


def test_the_card_is_the_one_asked_for() -> None:
    assert torch.version.cuda is not None
    assert torch.cuda.device_count() == 1
    (device,) = hardware.detect().devices
    known = hardware.find("RTX 3090")
    assert device.compute_capability == known.compute_capability == (8, 6)
    assert device.memory == known.memory
    # The driver's name is found in the table, whose figures fill the gaps.
    assert device.memory_bandwidth == known.memory_bandwidth


@pytest.mark.machine(card="H100 SXM", devices=2)
def test_another_machine() -> None:
    assert torch.cuda.device_count() == 2
    properties = torch.cuda.get_device_properties(1)
    assert properties.name == "NVIDIA H100 SXM"
    assert (properties.major, properties.minor) == (9, 0)
    assert properties.multi_processor_count == 132
    assert properties.total_memory == hardware.find("H100 SXM").memory


def test_copies_copy_and_kernels_compute_nothing() -> None:
    host = torch.arange(1000, dtype=torch.float32)
    there = host.cuda()
    assert torch.equal(there[10:].cpu(), host[10:])
    assert torch.equal(there.clone().cpu(), host)
    assert not (torch.zeros(1000, device="cuda") + 1).cpu().any()


def test_launches_are_recorded_with_their_stream() -> None:
    x = torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    with standin.recorded() as record:
        x.relu()
        with torch.cuda.stream(side):
            x.tanh()
    relu, tanh = record.launches
    assert "elementwise_kernel" in relu.kernel
    assert relu.stream == torch.cuda.default_stream().cuda_stream
    assert "tanh" in tanh.kernel
    assert tanh.stream == side.cuda_stream != relu.stream


def test_arguments_are_kept_when_asked_for() -> None:
    """The first argument of torch's simple elementwise kernels is their length."""
    x = torch.zeros(1234, device="cuda")
    wanted = standin.Argument("elementwise_kernel", 0, 4)
    with standin.recorded(wanted) as record:
        x.relu()
    (launch,) = record.launches
    assert int.from_bytes(launch.argument, "little") == 1234


@pytest.mark.calls_unsupported
def test_what_nobody_wrote_is_not_supported_and_listed() -> None:
    before = standin.unsupported_calls().get("cusolverDnCreate", 0)
    with pytest.raises(RuntimeError, match="cusolver"):
        torch.linalg.qr(torch.zeros(8, 8, device="cuda"))
    assert standin.unsupported_calls()["cusolverDnCreate"] > before


def test_memory_is_taken_and_given_back() -> None:
    assert standin.used() == 0
    x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert standin.used() == torch.cuda.memory_reserved() == 30 * MIB
    free, total = torch.cuda.mem_get_info()
    assert total - free == 30 * MIB
    del x
    torch.cuda.empty_cache()
    assert standin.used() == 0


def test_a_full_card_runs_out_of_memory() -> None:
    x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    with (
        standin.capacity(40 * MIB),
        pytest.raises(torch.OutOfMemoryError, match="out of memory"),
    ):
        torch.empty(12 * MIB, dtype=torch.uint8, device="cuda")
    assert x.is_cuda
    assert torch.empty(12 * MIB, dtype=torch.uint8, device="cuda").is_cuda


def test_handles_are_distinct() -> None:
    """The main thread and autograd's each have a cuBLAS handle and its workspace."""
    layer = nn.Linear(64, 64, device="cuda")
    x = torch.zeros(64, 64, device="cuda")
    loss = layer(x).sum()
    before = torch.cuda.memory_allocated()
    workspace = 4096 * 1024 * 2 + 16 * 1024 * 8  # torch's default on this card
    loss.backward()
    gradients = sum(p.grad.numel() * 4 for p in layer.parameters())
    assert torch.cuda.memory_allocated() - before >= workspace + gradients


@pytest.mark.machine(devices=2)
def test_a_stream_of_another_device_takes_no_kernel() -> None:
    """As on a card: a launch that forgot to make its device the current one fails."""
    torch.zeros(1, device="cuda:0")
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
    assert standin.launch_nothing(stream.cuda_stream) == "invalid resource handle"
    with torch.cuda.device(1):
        assert standin.launch_nothing(stream.cuda_stream) == "no error"
