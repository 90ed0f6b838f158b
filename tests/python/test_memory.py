"""memscale.memory.track(): exact bytes on the CPU and on an accelerator."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from memscale.memory import MemoryTracker, track

KIB = 1024


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_current_and_peak(device: str, sim: torch.device) -> None:
    with track(device) as memory:
        a = torch.empty(64 * KIB, dtype=torch.uint8, device=device)
        b = torch.empty(32 * KIB, dtype=torch.uint8, device=device)
        assert memory.current - memory.before == 96 * KIB
        del a
        assert memory.current - memory.before == 32 * KIB
        assert memory.peak - memory.before == 96 * KIB
    after = memory.current
    del b
    assert memory.current == after, "a stopped tracker keeps its figures"
    assert memory.peak - memory.before == 96 * KIB
    assert memory.device.type == device


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_nested_and_overlapping(device: str, sim: torch.device) -> None:
    def use(kib: int) -> None:
        torch.empty(kib * KIB, dtype=torch.uint8, device=device)

    first, second = (MemoryTracker(torch.device(device)) for _ in range(2))
    first.start()
    use(100)
    second.start()
    use(10)
    first.stop()
    use(20)
    with track(device) as inner:
        use(5)
    second.stop()
    assert first.peak - first.before == 100 * KIB
    assert second.peak - second.before == 20 * KIB
    assert inner.peak - inner.before == 5 * KIB


def test_cpu_and_cpu_0_are_one_device() -> None:
    with track("cpu") as outer:
        torch.empty(100 * KIB, dtype=torch.uint8)
        with track("cpu:0"):
            pass
    assert outer.peak - outer.before == 100 * KIB


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda _: torch.UntypedStorage(64 * KIB), id="UntypedStorage"),
        pytest.param(lambda a: a.untyped_storage().clone(), id="storage.clone"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda a: copy.deepcopy(torch.nn.Buffer(a)), id="buffer"),
        pytest.param(lambda a: torch.nn.Parameter(a.clone()), id="parameter"),
        pytest.param(
            lambda _: torch.UntypedStorage(0).resize_(64 * KIB), id="storage.resize_"
        ),
    ],
)
def test_storages_of_torchs_default_allocator_are_counted(
    make: Callable[[torch.Tensor], object],
) -> None:
    a = torch.zeros(16 * KIB)
    with track("cpu") as memory:
        made = make(a)
        assert memory.current - memory.before == 64 * KIB
        del made
        assert memory.current == memory.before


def test_memory_that_is_not_torchs_is_not_counted() -> None:
    with track("cpu") as memory:
        made = torch.frombuffer(bytearray(64 * KIB), dtype=torch.uint8)
        assert memory.current == memory.before
    del made


def test_storages_from_before_the_import_are_freed_by_their_own_allocator() -> None:
    code = (
        "import torch\n"
        "old = [torch.UntypedStorage(1 << 20), torch.zeros(1 << 18)]\n"
        "import memscale\n"
        "with memscale.memory.track('cpu') as m:\n"
        "    old[0].resize_(2 << 20)\n"
        "    assert m.current - m.before == 2 << 20, m.current\n"
        "    old.clear()\n"
        "assert m.current == m.before, m.current"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_default_device_is_the_accelerator(sim: torch.device) -> None:
    with track() as memory:
        pass
    assert memory.device == sim


def test_without_accelerator_the_cpu_is_measured() -> None:
    code = (
        "import memscale, torch\n"
        "with memscale.memory.track() as m: x = torch.empty(1000)\n"
        "assert m.device == torch.device('cpu') and m.peak - m.before == 4000, m.peak"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cpu_counts_every_thread_and_kernel_workspaces() -> None:
    def work() -> None:
        torch.empty(300 * KIB, dtype=torch.uint8)

    with track("cpu") as memory:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert memory.peak - memory.before == 300 * KIB
    assert memory.current == memory.before

    x = torch.randn(100, 100)
    with track("cpu") as memory:
        torch.linalg.inv(x)
    assert memory.peak - memory.before > 100 * 100 * 4


def test_a_model_leaves_nothing_behind() -> None:
    gc.collect()
    with track("cpu") as memory:
        model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.ReLU())
        model(torch.randn(8, 50)).sum().backward()
        del model
        gc.collect()
        assert memory.current == memory.before


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"'meta' cannot be tracked"), track("meta"):
        pass
    tracker = MemoryTracker(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="never started"):
        _ = tracker.peak
    tracker.start()
    with pytest.raises(RuntimeError, match="already running"):
        tracker.start()
    tracker.stop()
    tracker.stop()
    with pytest.raises(RuntimeError, match="inside"), track("cpu") as memory:
        raise RuntimeError("inside")
    assert memory.peak >= memory.before


def test_tensors_made_before_memscale_are_freed_safely() -> None:
    code = (
        "import torch\n"
        "x = torch.ones(1000); conv = torch.nn.Conv2d(3, 8, 3)\n"
        "y = conv(torch.ones(1, 3, 32, 32))\n"
        "import memscale\n"
        "with memscale.memory.track('cpu') as m:\n"
        "    del x; y.sum().backward(); del y, conv\n"
        "assert m.current >= 0, m.current"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
