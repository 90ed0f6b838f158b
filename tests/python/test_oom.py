"""explain_oom against real OutOfMemoryErrors on the simulated device."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memscale
from memscale.estimation.oom import OomReport, explain_oom
from memscale.estimation.oom_place import read_message

MakeDevice = Callable[[int | str], torch.device]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Tower(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Failure(Exception):
    """Which phase of a step really failed, and in which block."""

    def __init__(self, phase: str, block: str | None, error: BaseException) -> None:
        super().__init__(phase)
        self.phase = phase
        self.block = block
        self.error = error


def watch_blocks(model: Tower) -> list[str]:
    """A list that gets a block's name as its forward or backward begins."""
    begun: list[str] = []
    for index, block in enumerate(model.blocks):
        name = f"blocks.{index}"
        block.register_forward_pre_hook(lambda *_, name=name: begun.append(name))
        block.register_full_backward_pre_hook(lambda *_, name=name: begun.append(name))
    return begun


def step(
    model: nn.Module,
    batch: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    begun: list[str] | None = None,
) -> None:
    """A training step that says where it failed."""
    phase = "forward"
    try:
        loss = mean_square(model(batch))
        phase = "backward"
        loss.backward()
        del loss
        phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
    except torch.OutOfMemoryError as error:
        raise Failure(phase, begun[-1] if begun else None, error) from None


def fail(
    device: torch.device, rows: int, width: int, *, watch: bool, steps: int = 1
) -> tuple[Failure, Tower, torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tower(width).to(device)
    begun = watch_blocks(model) if watch else None
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(rows, width, device=device)
    try:
        for _ in range(steps):
            step(model, batch, optimizer, begun)
    except Failure as failure:
        return failure, model, batch, optimizer
    raise AssertionError(f"{steps} steps fitted")


def first_step_peaks(rows: int, width: int) -> dict[str, int]:
    """Of each phase, before there is an optimizer's state."""
    memscale.simdev.enable()
    made = memscale.estimate(
        Tower(width), torch.zeros(rows, width), loss_fn=mean_square, device="sim"
    )
    state = made.breakdown["optimizer_state"]
    return {
        phase: size - (0 if phase == "optimizer" else state)
        for phase, size in made.phases.items()
    }


def report_of(
    failure: Failure, model: Tower, batch: torch.Tensor, optimizer: object
) -> OomReport:
    return explain_oom(failure.error, model, batch, optimizer, mean_square)


# ---- where ----


def capacities(phase: str, rows: int, width: int) -> list[int]:
    """Sizes of a device on which the first step fails in that phase."""
    peaks = first_step_peaks(rows, width)
    before = {
        "forward": peaks["forward"] // 3,
        "backward": peaks["forward"],
        "optimizer": max(peaks["forward"], peaks["backward"]),
    }[phase]
    room = peaks[phase] - before
    assert room > 4096, f"no device fails in {phase}: {peaks}"
    return [(before + room * part // 5) // 512 * 512 for part in (1, 2, 4)]


@pytest.mark.parametrize(
    ("phase", "rows", "width"),
    [("forward", 2048, 64), ("backward", 2048, 64), ("optimizer", 8, 128)],
)
def test_names_the_place_where_it_really_failed(
    sim_of: MakeDevice, phase: str, rows: int, width: int
) -> None:
    for capacity in capacities(phase, rows, width):
        watched = fail(sim_of(capacity), rows, width, watch=True)[0]
        assert watched.phase == phase
        block = watched.block
        del watched
        failed = fail(sim_of(capacity), rows, width, watch=False)
        report = report_of(*failed)
        assert (report.phase, report.seen_phase) == (phase, phase)
        assert report.first_step or phase == "optimizer"  # which made the state
        assert report.capacity == report.available == capacity
        assert report.excess == report.bytes - capacity > 0
        assert sum(report.breakdown.values()) == report.bytes
        assert sum(share.bytes for share in report.layers) == report.bytes
        assert report.layer == (None if phase == "optimizer" else block)
        assert report.seen_layer == (block if phase == "forward" else None)
        state = report.breakdown["optimizer_state"]
        assert (state > 0) == (phase == "optimizer")
        del failed, report


def test_after_the_first_step_the_state_counts(sim_of: MakeDevice) -> None:
    rows, width = 512, 64
    peaks = first_step_peaks(rows, width)
    # Room for the first step, not for the second one.
    capacity = max(peaks.values()) + 512
    failed = fail(sim_of(capacity), rows, width, watch=False, steps=2)
    report = report_of(*failed)
    assert not report.first_step
    assert report.breakdown["optimizer_state"] > 0
    assert report.phase == failed[0].phase


def test_an_unknown_optimizer_is_tried_without_and_with_state(
    sim_of: MakeDevice,
) -> None:
    failure, model, batch, _ = fail(sim_of("2MiB"), 2048, 64, watch=False)
    report = report_of(failure, model, batch, "adamw")
    assert report.first_step
    assert report.layer == report.seen_layer


# ---- what would help ----


def test_options_are_true(sim_of: MakeDevice) -> None:
    rows, width = 2048, 64
    needed = max(first_step_peaks(rows, width).values())
    capacity = needed * 3 // 4
    failed = fail(sim_of(capacity), rows, width, watch=False)
    report = report_of(*failed)
    options = {option.change.split(" (")[0]: option for option in report.options}
    half = options["batch 2048 -> 1024"]
    assert half.fits
    assert half.frees == report.estimate.peak_bytes - half.peak_bytes > 0
    assert options["recompute the repeated blocks in backward"].fits
    assert not options["SGD without momentum"].fits
    assert options["optimizer state in 8 bits"].approximate
    frees = [option.frees for option in report.options]
    assert frees == sorted(frees, reverse=True)
    assert min(frees) > 0
    del failed, report

    device = sim_of(capacity)
    model = Tower(width).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(1024, width, device=device)
    step(model, batch, optimizer)  # makes the state
    with memscale.memory.track(device) as memory:
        step(model, batch, optimizer)  # fits
    assert abs(memory.peak - half.peak_bytes) <= half.peak_bytes // 100


def test_halves_until_it_fits(sim_of: MakeDevice) -> None:
    report = report_of(*fail(sim_of("2MiB"), 2048, 64, watch=False))
    batches = [o for o in report.options if o.change.startswith("batch")]
    assert [option.fits for option in batches] == [True, False]
    assert batches[1].change == "batch 2048 -> 1024"


def test_options_that_do_not_apply_are_left_out(sim_of: MakeDevice) -> None:
    device = sim_of("1MiB")
    model = nn.Linear(64, 1024).to(device)
    batch = torch.zeros(1, 64, device=device)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.zeros(4096, 64, device=device))
    report = explain_oom(caught.value, model, batch, optimizer=None)
    text = " ".join(option.change for option in report.options)
    for absent in ("batch", "recompute", "SGD", "8 bits"):
        assert absent not in text


# ---- the context manager ----


def test_context_adds_the_report_and_lets_the_error_go_on(sim_of: MakeDevice) -> None:
    device = sim_of("2MiB")
    model = Tower().to(device)
    batch = torch.zeros(2048, 64, device=device)
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        explain_oom(model, batch, loss_fn=mean_square) as watch,
    ):
        mean_square(model(batch)).backward()
    report = watch.report
    assert report is not None
    assert report.others == 0
    assert (report.phase, report.layer) == ("forward", report.seen_layer)
    assert caught.value.__notes__ == [str(report)]
    shown = "".join(traceback.format_exception(caught.value))
    assert "why this step ran out of memory" in shown
    assert f"runs out in forward, {report.op} of {report.layer}" in " ".join(
        shown.split()
    )
    json.dumps(report.to_dict())


@pytest.mark.parametrize("steps", [0, 1])
def test_context_sees_whether_there_is_state(sim_of: MakeDevice, steps: int) -> None:
    device = sim_of("4MiB")
    model = Tower().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        step_plainly(model, torch.zeros(8, 64, device=device), optimizer)
        optimizer.zero_grad()
    batch = torch.zeros(2048, 64, device=device)
    with (
        pytest.raises(torch.OutOfMemoryError),
        explain_oom(model, batch, "adamw", mean_square) as watch,  # only its name
    ):
        step_plainly(model, batch, optimizer)
    report = watch.report
    assert report is not None
    assert report.first_step == (steps == 0)
    assert report.layer == report.seen_layer
    assert report.others == 0


def test_context_without_an_error_does_nothing(sim: torch.device) -> None:
    model = Tower().to(sim)
    with explain_oom(model, torch.zeros(1, 64, device=sim)) as watch:
        model(torch.zeros(1, 64, device=sim))
    assert watch.report is None


def test_other_errors_pass_untouched(sim: torch.device) -> None:
    model = Tower().to(sim)
    with pytest.raises(KeyError) as caught, explain_oom(model) as watch:
        raise KeyError("mine")
    assert watch.report is None
    assert not hasattr(caught.value, "__notes__")


def test_a_failing_report_does_not_hide_the_error(sim_of: MakeDevice) -> None:
    device = sim_of("1MiB")
    model = Tower().to(device)
    with (
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught,
        explain_oom(model, torch.zeros(1, 3, device=device)) as watch,
    ):
        torch.empty(1 << 20, device=device)
    assert watch.report is None
    (note,) = caught.value.__notes__
    assert note.startswith("memscale cannot explain this: RuntimeError")


def test_tensors_of_others_are_counted(sim_of: MakeDevice) -> None:
    device = sim_of("4MiB")
    ballast = torch.zeros(3 << 18, device=device)  # 3 MiB
    model = Tower().to(device)
    batch = torch.zeros(1024, 64, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.raises(torch.OutOfMemoryError),
        explain_oom(model, batch, optimizer, mean_square) as watch,
    ):
        step_plainly(model, batch, optimizer)
    report = watch.report
    assert report is not None
    assert report.others == ballast.nbytes
    assert report.available == (4 << 20) - ballast.nbytes
    assert report.layer == report.seen_layer
    assert "others hold" in str(report)


def step_plainly(
    model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer
) -> None:
    mean_square(model(batch)).backward()
    optimizer.step()


def test_says_so_if_the_estimate_fits(sim_of: MakeDevice) -> None:
    device = sim_of("4MiB")
    model = Tower().to(device)
    batch = torch.zeros(8, 64, device=device)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(4 << 20, device=device)
    report = explain_oom(caught.value, model, batch)
    assert report.fits
    assert report.excess is None
    assert report.allocated == torch.accelerator.memory_allocated()
    assert "By the estimate this step fits" in str(report)


# ---- arguments and messages ----


def test_only_out_of_memory_errors_are_explained() -> None:
    with pytest.raises(TypeError, match=r"OutOfMemoryError, got ValueError"):
        explain_oom(ValueError("x"), Tower())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"torch\.nn\.Module or an OutOf"):
        explain_oom(3)  # type: ignore[call-overload]


def test_reads_the_message_of_cuda() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity "
        "of 23.50 GiB of which 16.00 MiB is free. Process 7 has 1.00 GiB memory in "
        "use. Including non-PyTorch memory, this process has 22.00 GiB memory in use. "
        "20.00 GiB allowed; Of the allocated memory 21.00 GiB is allocated by "
        "PyTorch, and 512.00 KiB is reserved by PyTorch but unallocated."
    )
    assert read_message(text) == {
        "requested": 20 << 20,
        "capacity": 47 << 29,
        "free": 16 << 20,
        "allowed": 20 << 30,
        "allocated": 21 << 30,
        "reserved": 512 << 10,
    }
    assert read_message("no numbers") == {}


def test_a_card_of_a_message_has_what_is_free_and_torchs() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of "
        "8.00 MiB of which 1.00 MiB is free. Of the allocated memory 1.00 MiB is "
        "allocated by PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated."
    )
    report = explain_oom(error, Tower(), torch.zeros(2048, 64), device="RTX 3090")
    assert (report.capacity, report.available) == (8 << 20, 3 << 20)
    assert report.requested == 2 << 20
    assert report.allocated is None
