"""The device's counter is the sum of live storages, whatever a program does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memscale import simdev


def rounded(bytes_: int) -> int:
    return (bytes_ + 511) // 512 * 512


def live_bytes(tensors: list[torch.Tensor]) -> int:
    """Sum over distinct storages, each rounded up to 512 bytes."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(rounded(s.nbytes()) for s in storages.values())


class AnyProgram(RuleBasedStateMachine):
    """Makes, views, changes, resizes and frees tensors in any order."""

    def __init__(self) -> None:
        super().__init__()
        simdev.enable(memory="4GiB")
        self.live: list[torch.Tensor] = []
        self.before = torch.accelerator.memory_allocated()

    def pick(self, data: st.DataObject) -> torch.Tensor | None:
        # By index: hypothesis would keep a drawn tensor alive.
        if not self.live:
            return None
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    @rule(
        rows=st.integers(0, 40),
        columns=st.integers(0, 300),
        dtype=st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]),
    )
    def make(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.live.append(torch.ones(rows, columns, device="sim").to(dtype))

    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        if (tensor := self.pick(data)) is not None:
            self.live.append(tensor.mT[..., 1:] if tensor.dim() > 1 else tensor[1:])

    @rule(
        data=st.data(),
        op=st.sampled_from(["clone", "neg", "sort", "nonzero", "unique"]),
    )
    def call(self, data: st.DataObject, op: str) -> None:
        tensor = self.pick(data)
        if tensor is None or tensor.dtype == torch.bool:
            return
        result = getattr(tensor, op)()
        self.live.extend(result if isinstance(result, tuple) else [result])

    @rule(data=st.data())
    def norm(self, data: st.DataObject) -> None:
        tensor = self.pick(data)
        if tensor is not None and tensor.dtype == torch.float32 and tensor.numel():
            self.live.append(F.layer_norm(tensor, tensor.shape[-1:]))

    @rule(data=st.data())
    def change_in_place(self, data: st.DataObject) -> None:
        if (tensor := self.pick(data)) is not None and tensor.dtype == torch.float32:
            tensor.mul_(2).add_(1).relu_()

    @rule(data=st.data(), size=st.integers(0, 20_000))
    def resize(self, data: st.DataObject, size: int) -> None:
        tensor = self.pick(data)
        if tensor is None:
            return
        tensor.resize_(size // 100, 100)
        out = torch.empty(0, dtype=torch.int64, device="sim")
        torch.arange(size, out=out)
        self.live.append(out)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.live:
            self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))

    @invariant()
    def counter_is_the_sum(self) -> None:
        held = torch.accelerator.memory_allocated() - self.before
        assert held == live_bytes(self.live)

    def teardown(self) -> None:
        self.live.clear()
        assert torch.accelerator.memory_allocated() == self.before


TestAnyProgram = AnyProgram.TestCase
TestAnyProgram.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 5000))
def test_charges_are_rounded_to_512_bytes(count: int) -> None:
    simdev.enable(memory="4GiB")
    before = torch.accelerator.memory_allocated()
    tensor = torch.empty(count, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_allocated() - before == rounded(count)
    del tensor


def test_statistics_of_torch_accelerator(sim: torch.device) -> None:
    torch.accelerator.reset_accumulated_memory_stats()
    kept = torch.empty(100, device=sim)  # 512 bytes
    torch.empty(1000, device=sim)  # 4096 bytes, freed at once
    assert torch.accelerator.memory_allocated() == 512
    assert torch.accelerator.max_memory_allocated() == 4608
    assert torch.accelerator.memory_reserved() == 512
    stats = torch.accelerator.memory_stats()
    assert stats["allocated_bytes.all.current"] == 512
    assert stats["allocated_bytes.all.allocated"] == 4608
    assert stats["allocated_bytes.all.freed"] == 4096
    assert stats["requested_bytes.all.current"] == 400
    assert stats["allocation.all.current"] == 1
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 512
    assert torch.accelerator.get_memory_info() == ((4 << 30) - 512, 4 << 30)
    assert torch.sim.mem_get_info() == torch.accelerator.get_memory_info()
    del kept


def test_workspaces_are_charged(sim: torch.device) -> None:
    x = torch.randn(200, 200, device=sim)
    held = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    result = torch.linalg.inv(x)
    # The result, and at least the copy that LAPACK destroys.
    extra = torch.accelerator.max_memory_allocated() - held
    assert extra >= 2 * rounded(200 * 200 * 4)
    assert torch.accelerator.memory_allocated() - held == live_bytes([result])


def test_the_profiler_sees_device_bytes(sim: torch.device) -> None:
    a = torch.randn(100, 100, device=sim)
    with torch.profiler.profile(profile_memory=True) as profile:
        b = a @ a
    [mm] = [e for e in profile.key_averages() if e.key == "aten::mm"]
    assert mm.self_device_memory_usage == rounded(100 * 100 * 4)
    del b


def test_dropout_keeps_a_bool_mask(sim: torch.device) -> None:
    x = torch.randn(1000, 1000, device=sim, requires_grad=True)
    held = torch.accelerator.memory_allocated()
    out = F.dropout(x, 0.1)
    kept = torch.accelerator.memory_allocated() - held
    assert kept == rounded(4_000_000) + rounded(1_000_000)
    del out
