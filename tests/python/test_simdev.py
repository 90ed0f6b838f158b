"""The simulated device behaves as torch users expect of a device."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import memscale
from memscale import simdev

SimOf = Callable[[int | str], torch.device]


def test_is_torchs_accelerator(sim: torch.device) -> None:
    assert sim == torch.device("sim", 0)
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.get_device_module("sim") is torch.sim
    torch.accelerator.synchronize()


@pytest.mark.parametrize(
    "memory", ["0", "0GiB", "-1GiB", "banana", "", "1.5 potatoes", "99999999TiB", "nan"]
)
def test_nonsense_sizes_are_refused(memory: str, sim: torch.device) -> None:
    with pytest.raises(ValueError, match="memory"):
        simdev.enable(memory=memory)
    assert torch.accelerator.get_memory_info() == (4 << 30, 4 << 30)


@pytest.mark.parametrize("memory", [0, -5])
def test_sizes_must_be_positive(memory: int, sim: torch.device) -> None:
    with pytest.raises(ValueError, match=f"memory.*{memory}"):
        simdev.enable(memory=memory)


@pytest.mark.parametrize("memory", [2.5, None, True, [1]])
def test_sizes_must_be_sizes(memory: object, sim: torch.device) -> None:
    with pytest.raises((TypeError, ValueError)):
        simdev.enable(memory=memory)  # type: ignore[arg-type]


def test_resizes_only_while_empty(sim_of: SimOf) -> None:
    device = sim_of("1MiB")
    held = torch.ones(1000, device=device)
    with pytest.raises(RuntimeError, match=r"in use: 4\.00 KiB in 1 blocks"):
        simdev.enable(memory="2MiB")
    assert simdev.enable(memory="1MiB") == device  # the same size is no change
    assert held.sum().item() == 1000
    del held
    simdev.enable(memory="2MiB")
    assert torch.accelerator.get_memory_info() == (2 << 20, 2 << 20)


def test_out_of_memory_reads_like_torchs(sim_of: SimOf) -> None:
    device = sim_of("1MiB")
    held = torch.ones(1 << 17, device=device)  # 512 KiB
    torch.accelerator.reset_accumulated_memory_stats()
    message = (
        r"^sim out of memory\. Tried to allocate 768\.00 KiB\. Device 0 has a total "
        r"capacity of 1\.00 MiB of which 512\.00 KiB is free\."
    )
    with pytest.raises(torch.OutOfMemoryError, match=message):
        torch.empty(3 << 16, device=device)
    assert torch.accelerator.memory_allocated() == 512 << 10
    assert held.sum().item() == 1 << 17
    assert torch.accelerator.memory_stats()["num_ooms"] == 1


def test_running_out_inside_a_kernel_leaves_the_device_usable(sim_of: SimOf) -> None:
    device = sim_of("1MiB")
    a = torch.ones(300, 300, device=device)
    b = torch.ones(300, 300, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.linalg.solve(a + torch.eye(300, device=device), b)
    del b
    before = torch.accelerator.memory_allocated()
    assert (a * 2).sum().item() == 2 * 300 * 300
    assert torch.accelerator.memory_allocated() == before


def test_running_out_in_backward_leaves_the_device_usable(sim_of: SimOf) -> None:
    device = sim_of("2600KiB")
    layer = nn.Linear(300, 300, device=device)
    x = torch.randn(600, 300, device=device, requires_grad=True)
    loss = layer(x).relu().sum()
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    layer.zero_grad()
    layer(x[:10]).sum().backward()
    assert layer.weight.grad is not None


def test_mixed_devices_get_torchs_error(sim: torch.device) -> None:
    here, there = torch.ones(4), torch.ones(4, device=sim)
    for call in (
        lambda: here + there,
        lambda: there + here,
        lambda: torch.cat([here, there]),
        lambda: there.add_(here),
        lambda: torch.mm(here.view(2, 2), there.view(2, 2)),
        lambda: F.linear(there, here.view(1, 4)),
        lambda: torch.tensor(1.0).add_(there[0]),
        lambda: torch.add(there, there, out=torch.empty(4)),
        lambda: here.index_put_((torch.tensor([0]),), there[:1]),
        lambda: here[there > 0],
        lambda: there.index_put_((torch.tensor([0, 1], device=sim),), here[:2]),
        lambda: torch.ops.aten.native_dropout_backward(there, here > 0, 2.0),
        lambda: F.scaled_dot_product_attention(
            *[torch.ones(1, 1, 4, 4, device=sim)] * 3, attn_mask=here.view(1, 1, 1, 4)
        ),
    ):
        with pytest.raises(
            RuntimeError, match="Expected all tensors to be on the same"
        ):
            call()
    assert torch.equal(there.cpu(), torch.ones(4))
    # What accelerators allow: CPU scalars, CPU indices, copies.
    assert (there * torch.tensor(2.0)).sum().item() == 8
    assert there[torch.tensor([0, 1])].shape == (2,)
    there.copy_(here * 3)
    assert there.sum().item() == 12
    torch._foreach_copy_([there], [here])
    torch._foreach_copy_([here], [there * 5])
    assert here.sum().item() == 20


def test_invalid_devices_and_layouts(sim: torch.device) -> None:
    with pytest.raises(RuntimeError, match="one device"):
        torch.empty(1, device="sim:1")
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(1, device=sim, pin_memory=True)
    with pytest.raises(NotImplementedError, match="strided tensors only"):
        torch.eye(2, device=sim).to_sparse()
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device=sim, generator=torch.Generator())


def test_random_streams_match_the_cpu_and_are_separate(sim: torch.device) -> None:
    def draw(device: str | torch.device) -> list[torch.Tensor]:
        return [
            torch.randn(5, device=device).cpu(),
            torch.rand(3, device=device).cpu(),
            torch.randperm(6, device=device).cpu(),
            torch.bernoulli(torch.full((20,), 0.5, device=device)).cpu(),
            torch.multinomial(torch.ones(8, device=device), 4).cpu(),
            F.dropout(torch.ones(20, device=device), 0.5).cpu(),
            F.rrelu(-torch.ones(8, device=device), training=True).cpu(),
        ]

    torch.manual_seed(3)
    on_cpu = draw("cpu")
    on_sim = draw(sim)
    for a, b in zip(on_cpu, on_sim, strict=True):
        assert torch.equal(a, b)

    cpu_state = torch.get_rng_state()
    draw(sim)
    assert torch.equal(torch.get_rng_state(), cpu_state)


def test_generators(sim: torch.device) -> None:
    generator = torch.Generator(device=sim).manual_seed(11)
    first = torch.rand(4, device=sim, generator=generator)
    state = generator.get_state()
    second = torch.rand(4, device=sim, generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(4, device=sim, generator=generator), second)
    generator.manual_seed(11)
    assert torch.equal(torch.rand(4, device=sim, generator=generator), first)

    state = torch.sim.get_rng_state()
    drawn = torch.rand(4, device=sim)
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=sim), drawn)
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.rand(100, device=sim)
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=sim), drawn)


def test_checkpointing_replays_dropout(sim: torch.device) -> None:
    body = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 1)).to(sim)
    x = torch.randn(8, 16, device=sim, requires_grad=True)
    torch.manual_seed(0)
    body(x).sum().backward()
    plain = x.grad
    x.grad = None
    torch.manual_seed(0)
    checkpoint(body, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, plain)


def test_views_share_memory(sim: torch.device) -> None:
    base = torch.zeros(4, 6, device=sim)
    held = torch.accelerator.memory_allocated()
    views = [
        base.view(24),
        base[1],
        base.t(),
        base[:, ::2],
        base.unfold(1, 2, 2),
        base.reshape(2, 12),
        base.expand(3, 4, 6),
        base.as_strided((2, 2), (6, 1)),
        base.detach(),
        torch.view_as_complex(base.view(12, 2)),
        base.view(torch.int32),
        base.diagonal(),
        base.movedim(0, 1),
        *base.chunk(2),
        *base.unbind(),
    ]
    assert torch.accelerator.memory_allocated() == held
    for view in views:
        storage = view.untyped_storage()
        assert storage.data_ptr() == base.untyped_storage().data_ptr()
    base[1, 2] = 5
    assert views[1][2].item() == 5
    views[2][0, 0] = 7
    assert base[0, 0].item() == 7


def test_out_arguments_and_resizing(sim: torch.device) -> None:
    a, b = torch.rand(30, 30, device=sim), torch.rand(30, 30, device=sim)
    out = torch.empty(0, device=sim)
    torch.mm(a, b, out=out)
    assert out.device == sim
    assert torch.equal(out.cpu(), a.cpu() @ b.cpu())
    assert out.untyped_storage().nbytes() == 3600
    torch.add(a, b, out=out)
    assert torch.equal(out.cpu(), a.cpu() + b.cpu())

    grown = torch.arange(4, device=sim)
    grown.resize_(8)
    assert grown[:4].tolist() == [0, 1, 2, 3]
    storage = torch.arange(4, device=sim).untyped_storage()
    storage.resize_(64)
    assert storage.nbytes() == 64
    storage.resize_(0)
    assert storage.nbytes() == 0

    target = torch.empty(0, device=sim)
    target.set_(a)
    assert target.data_ptr() == a.data_ptr()


def test_indexing(sim: torch.device) -> None:
    cpu = torch.arange(24.0).view(4, 6)
    there = cpu.to(sim)
    mask, rows = cpu > 10, torch.tensor([3, 0])
    assert torch.equal(there[mask.to(sim)].cpu(), cpu[mask])
    assert torch.equal(there[rows.to(sim), 2:4].cpu(), cpu[rows, 2:4])
    assert torch.equal(there[..., None, -1].cpu(), cpu[..., None, -1])
    there[rows.to(sim)] = -1.0
    cpu[rows] = -1.0
    there[mask.to(sim)] += 2
    cpu[mask] += 2
    assert torch.equal(there.cpu(), cpu)
    assert there[1, 1].item() == cpu[1, 1].item()
    assert there.tolist() == cpu.tolist()
    assert torch.equal(there.nonzero().cpu(), cpu.nonzero())


def test_printing(sim: torch.device) -> None:
    assert repr(torch.arange(3, device=sim)) == "tensor([0, 1, 2], device='sim:0')"
    assert "device='sim:0'" in repr(torch.randn(2000, device=sim))
    assert "Linear(in_features=2" in repr(nn.Linear(2, 2).to(sim))
    assert "cpu" not in repr(torch.zeros(2, 2, device=sim, requires_grad=True))


def test_save_and_load(sim: torch.device, tmp_path: Path) -> None:
    layer = nn.Linear(4, 4).to(sim)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    same = torch.load(tmp_path / "state.pt")
    assert same["weight"].device == sim
    moved = torch.load(tmp_path / "state.pt", map_location="cpu")
    assert moved["weight"].device == torch.device("cpu")
    assert torch.equal(moved["weight"], layer.weight.detach().cpu())

    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3)}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, map_location="sim")["w"].device == sim
    layer.load_state_dict(moved)
    assert torch.equal(layer.weight.cpu(), moved["weight"])


def test_deepcopy_keeps_shared_storage(sim: torch.device) -> None:
    base = torch.randn(8, device=sim)
    twin_base, twin_view = copy.deepcopy([base, base[2:]])
    assert twin_base.device == sim
    assert torch.equal(twin_base, base)
    twin_base[2] = 42
    assert twin_view[0].item() == 42
    assert base[2].item() != 42


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin", [False, True])
def test_data_loader(workers: int, pin: bool, sim: torch.device) -> None:
    data = TensorDataset(torch.arange(40.0).view(10, 4), torch.arange(10))
    loader = DataLoader(data, batch_size=4, num_workers=workers, pin_memory=pin)
    total = 0.0
    for x, y in loader:
        assert x.is_pinned() == pin
        total += (x.to(sim, non_blocking=True).sum() + y.to(sim).sum()).item()
    assert total == sum(range(40)) + sum(range(10))


def test_pinned_memory(sim: torch.device) -> None:
    pinned = torch.ones(10).pin_memory()
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert not torch.ones(10).is_pinned()
    assert pinned.to(sim, non_blocking=True).sum().item() == 10


def test_dtypes_move_both_ways(sim: torch.device) -> None:
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ):
        cpu = torch.tensor([0, 1, 1, 0]).to(dtype)
        there = cpu.to(sim)
        assert there.dtype == dtype
        assert torch.equal(there.cpu(), cpu)
        assert torch.equal(there.to(torch.float64).cpu(), cpu.to(torch.float64))
    strided = torch.randn(4, 6).t()
    assert torch.equal(strided.to(sim).cpu(), strided)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert image.to(sim).is_contiguous(memory_format=torch.channels_last)


def test_threads_use_the_device_at_once(sim: torch.device) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            a = torch.rand(64, 64, generator=generator)
            expected = (a @ a).relu().sum().item()
            there = a.to(sim)
            for _ in range(50):
                assert (there @ there).relu().sum().item() == expected
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert torch.accelerator.memory_allocated() == 0


def test_a_forked_child_may_use_the_device(sim: torch.device) -> None:
    there = torch.ones(4, device=sim)
    child = os.fork()
    if child == 0:  # pragma: no cover
        os._exit(0 if (there * 2).sum().item() == 8 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_results_that_a_kernel_keeps_do_not_dangle(sim: torch.device) -> None:
    """A CPU kernel may cache a tensor that it returned; both stay right."""
    library = torch.library.Library("memscale_test", "DEF")
    library.define("table(Tensor x) -> Tensor")
    cache: list[torch.Tensor] = []

    def table(x: torch.Tensor) -> torch.Tensor:
        if not cache:
            cache.append(torch.arange(1000.0))
        return cache[0]

    library.impl("table", table, "CPU")
    x = torch.ones(4, device=sim)
    for _ in range(3):
        result = torch.ops.memscale_test.table(x)
        assert result.device == sim
        assert result.sum().item() == 499500
        del result
        # The block lives as long as the cache does, and stays charged.
        assert torch.accelerator.memory_allocated() == 4096 + 512
        overwrite = [torch.full((1000,), 7.0, device=sim) for _ in range(3)]
        assert cache[0].sum().item() == 499500
        del overwrite
    cache.clear()
    library._destroy()


def test_freed_storage_and_absurd_sizes(sim: torch.device) -> None:
    freed = torch.ones(4, device=sim)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was freed"):
        freed.sum()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**63 - 1, dtype=torch.uint8, device=sim)


def test_integer_histograms(sim: torch.device) -> None:
    """Mixture-of-experts models count tokens so; the CPU refuses integers."""
    experts = torch.tensor([0, 3, 3, 1, 3], dtype=torch.int32, device=sim)
    counts = torch.histc(experts, bins=4, min=0, max=3)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 1, 0, 3]


def test_cpu_autocast_stays_out_of_device_kernels(sim: torch.device) -> None:
    q = torch.randn(1, 2, 16, 8, device=sim)

    def attend() -> torch.Tensor:
        torch.manual_seed(0)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)

    plain = attend()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(), plain)
        assert (q @ q.mT).dtype == torch.float32


def test_deterministic_mode_fills_uninitialised_memory(sim: torch.device) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=sim).isnan().all()
        assert torch.empty_strided((2, 2), (1, 2), device=sim).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_transforms_and_compilers(sim: torch.device) -> None:
    q = torch.randn(3, 1, 2, 4, 8, device=sim)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    expected = torch.stack([attend(x) for x in q])
    torch.testing.assert_close(torch.func.vmap(attend)(q), expected)
    gradient = torch.func.grad(lambda x: attend(x).sum())(q[0])
    leaf = q[0].clone().requires_grad_()
    attend(leaf).sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)
    conv = nn.Conv2d(2, 2, 3, padding=1).to(sim).eval().requires_grad_(False)
    a, b = (torch.randn(1, 2, 5, 5, device=sim) for _ in "ab")
    traced = torch.jit.trace(nn.Sequential(conv, nn.ReLU()), (a,))
    assert torch.equal(traced(b), conv(b).relu())


def test_seed_set_before_the_device_is_loaded_counts() -> None:
    code = (
        "import torch, memscale\n"
        "torch.manual_seed(5); expected = torch.rand(4)\n"
        "device = memscale.simdev.enable('1MiB')\n"
        "assert torch.equal(torch.rand(4, device=device).cpu(), expected)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_backend_is_loaded_before_it_is_asked_for() -> None:
    code = (
        "import memscale, torch; assert torch.accelerator.current_accelerator() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert memscale.simdev is simdev
