"""Threads and processes: each trains as it would without wrap."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memscale
from compat_twins import (
    STEPS,
    Block,
    Net,
    Record,
    assert_same,
    batch,
    config_of,
    each_mode,
    executor_of,
    make,
    run,
    steps,
    untouched_process,  # noqa: F401
)
from memscale import OptimizationMode as Mode
from memscale import replay
from memscale.calls import hook_stack
from never_wrapped import assert_as_never_wrapped

# ---- threads ----


def without_dropout() -> nn.Module:
    """Threads share the generator of random numbers: nothing may draw from it."""
    return Net(block=lambda width: Block(width, p=0.0))


def in_threads(*works: Callable[[], object]) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], object]) -> None:
        try:
            start.wait()
            work()
            assert hook_stack.top() is None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def train(model: nn.Module, record: Record) -> None:
    steps(count=6)(model, record)


@each_mode
def test_threads_with_a_model_each(mode: Mode) -> None:
    plain = make(without_dropout)
    expected = Record()
    train(plain, expected)
    models = [memscale.wrap(make(without_dropout), config_of(mode)) for _ in range(3)]
    records = [Record() for _ in models]
    in_threads(
        *(lambda m=m, r=r: train(m, r) for m, r in zip(models, records, strict=True))
    )
    for model, record in zip(models, records, strict=True):
        assert_same(expected, record)
        assert executor_of(model).stats().saves_dropped > 0
        assert len(executor_of(model).plans) == 1
        memscale.detach(model)
        assert_as_never_wrapped(model, plain)


@each_mode
def test_threads_with_one_model(mode: Mode) -> None:
    """Each takes gradients of its own batches; the weights stay."""

    def build() -> nn.Module:
        model = without_dropout()
        model.statistics = nn.Identity()  # statistics would be everybody's
        return model

    def gradients(model: nn.Module, first: int, record: Record) -> None:
        for step in range(first, first + 6):
            loss = model(batch(step)).square().mean()
            for gradient in torch.autograd.grad(loss, list(model.parameters())):
                record("gradient", gradient)

    plain, ours = make(build), memscale.wrap(make(build), config_of(mode))
    expected = [Record() for _ in range(3)]
    records = [Record() for _ in range(3)]
    for i, record in enumerate(expected):
        gradients(plain, 6 * i, record)
    in_threads(
        *(lambda i=i, r=r: gradients(ours, 6 * i, r) for i, r in enumerate(records))
    )
    for a, b in zip(expected, records, strict=True):
        assert_same(a, b)
    assert executor_of(ours).stats().saves_dropped > 0
    assert len(executor_of(ours).plans) == 1
    memscale.detach(ours)
    assert_as_never_wrapped(ours, plain)


def test_forward_and_backward_in_other_threads() -> None:
    plain, ours = make(), memscale.wrap(make(), config_of(Mode.AGGRESSIVE))
    for model in (plain, ours):
        torch.manual_seed(1)
        losses: list[torch.Tensor] = []
        in_threads(lambda m=model, o=losses: o.append(m(batch()).square().mean()))
        in_threads(losses[0].backward)
    memscale.detach(ours)
    assert_as_never_wrapped(ours, plain)


def test_training_in_one_thread_and_evaluation_in_another() -> None:
    """Of one model: the other thread's ops and bits are torch's own all the time."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    x = torch.randn(4, 40, 64, generator=torch.Generator().manual_seed(1))
    mask = nn.Transformer.generate_square_subsequent_mask(40)
    plain, ours = make(build).eval(), memscale.wrap(make(build), config_of()).eval()
    with torch.no_grad():
        expected = plain(x, mask)
    ours(x, mask).sum().backward()  # planned
    inside, evaluated = threading.Event(), threading.Event()
    forward = ours.layers[1].forward

    def waiting(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            inside.set()
            assert evaluated.wait(60)
        out: torch.Tensor = forward(*args, **kwargs)
        return out

    def evaluate() -> None:
        assert inside.wait(60)
        with torch.no_grad():
            assert torch.equal(ours(x, mask), expected)
        evaluated.set()

    ours.layers[1].forward = waiting
    dropped = executor_of(ours).stats().saves_dropped
    in_threads(lambda: ours(x, mask).sum().backward(), evaluate)
    assert executor_of(ours).stats().saves_dropped > dropped


# ---- processes ----


class Rows(torch.utils.data.Dataset):
    """Holds the model, so that a worker gets it, and runs a part of it.

    Not all: spawned workers share its tensors, and statistics would be everybody's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            self.model.blocks[0](batch(index, rows=2))
        return batch(index)


@pytest.mark.parametrize(
    "context", ["fork", pytest.param("spawn", marks=pytest.mark.full)]
)
def test_data_loader_with_workers(context: str) -> None:
    """Workers that are forked, or get a pickle of the wrapped model."""

    def drive(model: nn.Module, record: Record) -> None:
        steps(count=1)(model, record)
        loader = torch.utils.data.DataLoader(
            Rows(model), batch_size=None, num_workers=2, multiprocessing_context=context
        )
        for x in loader:
            loss = model(x).square().mean()
            record("loss", loss)
            loss.backward()
        record.gradients(model)

    plain, ours = make(), memscale.wrap(make(), config_of())
    assert_same(run(drive, plain), run(drive, ours))
    assert executor_of(ours).stats().saves_dropped > 0


# ---- DistributedDataParallel ----


ORDERS = ("plain", "before", "after")


def _rank(rank: int, folder: str, mode: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    for order in ORDERS:
        record = _train_ddp(rank, order, mode, options)
        torch.save(record.tensors, f"{folder}/{order}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _train_ddp(rank: int, order: str, mode: str, options: dict[str, Any]) -> Record:
    # Without what is lossy: results are compared to the bit.
    config = memscale.Config(mode=mode, force_optimize=True, use_8bit_optimizer=False)
    torch.manual_seed(0)
    model = Net().train()
    if order == "before":
        memscale.wrap(model, config)
    ddp = DistributedDataParallel(model, **options)
    if order == "after":
        memscale.wrap(ddp, config)
    record = Record()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    torch.manual_seed(10 + rank)
    for step in range(STEPS):
        if "static_graph" not in options:
            with ddp.no_sync():  # accumulated, then reduced
                ddp(batch(4 * step + rank)).square().mean().backward()
        loss = ddp(batch(4 * step + 2 + rank)).square().mean()
        record("loss", loss)
        loss.backward()
        record.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    record.state(model)
    if order != "plain":
        wrapped = model if order == "before" else ddp
        executor = executor_of(wrapped)
        assert executor.stats().saves_dropped > 0, executor.stats()
        # The second micro-batch of a step adds to gradients: a kind of its own.
        assert len(executor.plans) == (1 if "static_graph" in options else 2)
        memscale.detach(wrapped)
        assert not replay.is_attached(ddp)
    return record


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("balanced", {"gradient_as_bucket_view": True}),
        pytest.param(
            "aggressive", {"find_unused_parameters": True}, marks=pytest.mark.full
        ),
        pytest.param("aggressive", {"static_graph": True}, marks=pytest.mark.full),
    ],
    ids=["bucket views", "unused parameters", "static graph"],
)
def test_distributed_data_parallel(
    tmp_path: Path, mode: str, options: dict[str, Any]
) -> None:
    """Two processes over gloo: wrapped before DDP, and the DDP module wrapped."""
    torch.multiprocessing.spawn(_rank, (str(tmp_path), mode, options), nprocs=2)
    for rank in range(2):
        runs = [torch.load(tmp_path / f"{order}-{rank}.pt") for order in ORDERS]
        for ours in runs[1:]:
            assert_same(Record(runs[0]), Record(ours))
