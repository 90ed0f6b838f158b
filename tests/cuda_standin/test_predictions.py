"""Questions asked before and after training, on CUDA torch."""

from __future__ import annotations

import pytest
import standin
import torch
from cuda_models import gpt2, peak_of_step, step
from measuring import is_as_predicted

import memscale
from memscale import Config

QUIET = {"enable_logging": False}


@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam]
)
def test_estimates_are_what_the_allocator_counts(optimizer_class) -> None:
    model, batch = gpt2()
    optimizer = optimizer_class(model.parameters())
    before = torch.cuda.memory_allocated()
    estimate = memscale.estimate(model, batch, optimizer=optimizer)
    assert torch.cuda.memory_allocated() == before, "an estimate allocates nothing"
    assert torch.cuda.max_memory_allocated() == before
    step(model, batch, optimizer)
    assert is_as_predicted(peak_of_step(model, batch, optimizer), estimate.peak_bytes)
    assert estimate.device == torch.device("cuda", 0)


def test_estimates_of_a_model_that_is_not_on_the_card() -> None:
    model, batch = gpt2()
    there = memscale.estimate(model, batch).peak_bytes
    here = memscale.estimate(model.cpu(), batch.cpu(), device="cuda").peak_bytes
    assert here == there


def test_an_estimate_fits_this_card() -> None:
    model, batch = gpt2()
    estimate = memscale.estimate(model, batch)
    assert estimate.fits("RTX 3090").fits
    assert estimate.fits(memscale.hardware.detect().devices[0]).fits


def test_plans_and_their_frontier() -> None:
    model, batch = gpt2()
    plan = memscale.plan(model, batch, config=Config(**QUIET))
    frontier = memscale.pareto(model, batch, config=Config(**QUIET))
    assert plan.device == "cuda:0"
    assert plan.peak_bytes < plan.plain_peak_bytes
    peaks = [it.peak_bytes for it in frontier]
    assert peaks == sorted(set(peaks))
    assert peaks[0] <= plan.peak_bytes
    slowdowns = [it.slowdown for it in frontier]
    assert slowdowns == sorted(slowdowns, reverse=True)


def test_each_plan_of_the_frontier_holds() -> None:
    model, batch = gpt2(layers=3)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, batch, optimizer)
    frontier = memscale.pareto(model, batch, optimizer, Config(**QUIET), max_plans=4)
    for plan in frontier:
        memscale.wrap(model, Config(plan=plan.to_json(), **QUIET))
        step(model, batch, optimizer)
        measured = peak_of_step(model, batch, optimizer)
        assert is_as_predicted(measured, plan.peak_bytes), str(plan)
        assert model._memscale_executor.stats().calls_unlike_keep_set == 0
        memscale.detach(model)


@pytest.mark.parametrize("policy", ["cheap", "block"])
def test_verify(policy: str) -> None:
    """Values are zeros here: what is run is the way there and back."""
    model, batch = gpt2()
    held = torch.cuda.memory_allocated()
    report = memscale.verify_correctness(model, batch, policy=policy)
    assert report.passed, str(report)
    assert report.how == "full step"
    assert report.num_compared > 50
    assert report.saves_dropped > 0
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == held


def test_verify_where_the_full_step_does_not_fit() -> None:
    model, batch = gpt2()
    needed = memscale.estimate(model, batch, optimizer=None).peak_bytes
    with standin.capacity(int(needed * 0.8)):
        report = memscale.verify_correctness(model, batch, policy="block")
    assert report.passed, str(report)
    assert report.how.startswith("batch ")


def test_track_reads_the_allocator() -> None:
    before = torch.cuda.memory_allocated()
    with memscale.memory.track() as memory:
        x = torch.empty(1 << 20, device="cuda")
        del x
        y = torch.empty(100, device="cuda")
    assert memory.before == before
    assert memory.peak - before == 4 << 20
    assert memory.current - before == 512
    assert y.is_cuda


def test_a_card_that_runs_out_is_explained() -> None:
    model, batch = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, batch, optimizer)
    peak = memscale.estimate(model, batch, optimizer=optimizer).peak_bytes
    torch.cuda.empty_cache()
    capacity = int(peak * 0.7)
    with standin.capacity(capacity):
        with pytest.raises(torch.OutOfMemoryError) as failed:
            step(model, batch, optimizer)
        report = memscale.explain_oom(failed.value, model, batch, optimizer)
    assert report.capacity == capacity
    assert report.excess is not None
    assert report.fits is False
    assert report.layer.startswith("model.transformer.h.")
    assert report.seen_phase == "forward"
    assert report.options, "something would free enough"
    optimizer.zero_grad()
    del failed
