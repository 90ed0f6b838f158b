"""8-bit optimizers on CUDA: which kernels run, on which stream, on which bytes."""

from __future__ import annotations

import struct

import pytest
import standin
import torch
from cuda_models import gpt2, mlp, step

import memscale
from memscale import _C, Config
from memscale.optim import AdamW8bit, to_8bit

needs_kernels = pytest.mark.skipif(
    not _C.has_cuda_step(), reason="MemScale was built without CUDA kernels: no nvcc"
)

# adam8_kernel(step, params, ...): the address of the parameter.
PARAMETER = standin.Argument("adam8_kernel", 1, 8)
NUM_ELEMENTS = 1 << 16


def parameter(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    it = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS, dtype=dtype, device="cuda"))
    it.grad = torch.zeros_like(it)
    return it


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "<float>"),
        (torch.bfloat16, "Bf16>"),
        (torch.float16, "Fp16>"),
    ],
)
def test_one_launch_for_each_parameter_and_no_temporaries(dtype, name: str) -> None:
    optimizer = AdamW8bit([parameter(dtype) for _ in range(3)])
    optimizer.step()
    params = optimizer.param_groups[0]["params"]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with standin.recorded(PARAMETER) as record:
        optimizer.step()
    assert torch.cuda.max_memory_allocated() == before
    launches = record.of("adam8_kernel")
    assert all(name in launch.kernel for launch in launches)
    addresses = [struct.unpack("<Q", launch.argument)[0] for launch in launches]
    assert addresses == [p.data_ptr() for p in params]


@needs_kernels
def test_launched_on_the_current_stream() -> None:
    optimizer = AdamW8bit([parameter()])
    optimizer.step()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), standin.recorded() as record:
        optimizer.step()
    assert {launch.stream for launch in record.of("adam8_kernel")} == {side.cuda_stream}


@needs_kernels
def test_float32_moments_have_a_kernel_of_their_own() -> None:
    optimizer = AdamW8bit([parameter()], bits=32)
    with standin.recorded() as record:
        optimizer.step()
    assert len(record.of("adam_kernel<float, float>")) == 1
    assert not record.of("adam8_kernel")


@needs_kernels
def test_conversion_of_an_optimizer_with_state_quantises_on_the_card() -> None:
    it = parameter()
    optimizer = torch.optim.AdamW([it])
    optimizer.step()
    with standin.recorded() as record:
        assert to_8bit(optimizer) is None
    kernels = [launch.kernel for launch in record.of("quantise_kernel")]
    assert len(kernels) == 2  # of both moments
    with standin.recorded() as record:
        optimizer.state_dict()
        memscale.optim.from_8bit(optimizer)
    assert len(record.of("dequantise_kernel")) == 2


def test_state_takes_two_bytes_for_each_parameter() -> None:
    optimizer = AdamW8bit([parameter()])
    before = torch.cuda.memory_allocated()
    optimizer.step()
    blocks = NUM_ELEMENTS // 256
    assert torch.cuda.memory_allocated() - before == 2 * (NUM_ELEMENTS + 4 * blocks)


@needs_kernels
def test_grad_scaler_with_a_fused_8_bit_step() -> None:
    model, batch = mlp()
    optimizer = AdamW8bit(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    with standin.recorded() as record:
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert record.of("adam8_kernel")


@needs_kernels
def test_wrap_converts_the_optimizer() -> None:
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    memscale.wrap(model, Config(use_8bit_optimizer=True, enable_logging=False))
    step(model, batch, optimizer)
    with standin.recorded() as record:
        step(model, batch, optimizer)
    assert isinstance(optimizer, AdamW8bit)
    large = [p for p in model.parameters() if p.numel() >= 4096]
    assert len(record.of("adam8_kernel")) == len(large)
    memscale.detach(model)
    assert type(optimizer) is torch.optim.AdamW


@needs_kernels
@pytest.mark.machine(devices=2)
def test_on_a_device_that_is_not_the_current_one() -> None:
    it = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS, device="cuda:1"))
    it.grad = torch.zeros_like(it)
    optimizer = AdamW8bit([it])
    with standin.recorded() as record:
        optimizer.step()
    assert [launch.device for launch in record.of("adam8_kernel")] == [1]
    assert torch.cuda.current_device() == 0


@pytest.mark.machine(kernels=False)
def test_without_kernels_torch_s_operators_step() -> None:
    assert not _C.has_cuda_step()
    optimizer = AdamW8bit([parameter()])
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with standin.recorded() as record:
        optimizer.step()
    assert not record.of("adam8_kernel")
    assert record.of("elementwise_kernel")
    assert 0 < torch.cuda.max_memory_allocated() - before <= 8 << 20
