"""Cards that are too small, and the ways of torch's caching allocator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import standin
import torch
from cuda_models import gpt2, step

import memscale
from memscale import Config

QUIET = {"enable_logging": False}


def reserved_by(config: Config | None) -> int:
    """Bytes that three steps take of the card, beginning with an empty cache."""
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    if config is not None:
        memscale.wrap(model, config)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step(model, batch, optimizer)
    return torch.cuda.max_memory_reserved()


def free_all() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def test_a_wrapped_model_trains_on_a_card_too_small_for_the_plain_one() -> None:
    plain = reserved_by(None)
    free_all()
    wrapped = reserved_by(Config(**QUIET))
    assert wrapped < plain
    free_all()
    with standin.capacity(wrapped):
        assert reserved_by(Config(**QUIET)) <= wrapped
        free_all()
        with pytest.raises(torch.OutOfMemoryError):
            reserved_by(None)


@pytest.fixture
def expandable_segments() -> Iterator[None]:
    """As PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True says, from now on."""
    free_all()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    free_all()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.usefixtures("expandable_segments")
def test_expandable_segments() -> None:
    plain = reserved_by(None)
    free_all()
    assert standin.used() == 0
    wrapped = reserved_by(Config(**QUIET))
    assert wrapped < plain
    segments = torch.cuda.memory_snapshot()
    assert segments
    assert all(segment["is_expandable"] for segment in segments)


def test_an_error_in_the_middle_of_a_step_leaves_nothing_behind() -> None:
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    executor = memscale.wrap(model, Config(**QUIET))._memscale_executor
    for _ in range(2):
        step(model, batch, optimizer)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    with standin.capacity(standin.used()), pytest.raises(torch.OutOfMemoryError):
        model(batch.repeat(4, 1)).backward()
    optimizer.zero_grad()
    assert torch.cuda.memory_allocated() == held
    step(model, batch, optimizer)
    assert executor.stats().calls_unlike_keep_set == 0


def test_a_sum_over_rows_takes_a_workspace() -> None:
    """torch's own; predictions do not count it yet (docs/cuda.md)."""
    x = torch.zeros(4096, 1024, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    result = x.sum(0)
    stats = torch.cuda.memory_stats()
    current = stats["requested_bytes.all.current"]
    assert current == x.nbytes + result.nbytes
    assert stats["requested_bytes.all.peak"] - current > result.nbytes * 1000
