"""Several models, and copies of one: saved, loaded, averaged, dropped."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from compat_twins import (
    STEPS,
    Net,
    Record,
    assert_same,
    batch,
    check_twins,
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
from never_wrapped import assert_as_never_wrapped


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


@each_mode
def test_average_of_weights(mode: Mode) -> None:
    """A copy made of a wrapped model is not wrapped, and follows as it should."""
    averages = []

    def drive(model: nn.Module, record: Record) -> None:
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            record("of the average", average(batch()))
        for name, parameter in average.named_parameters():
            record(name, parameter)
        torch.optim.swa_utils.update_bn([batch()], average)
        averages.append(average)

    check_twins(drive, mode)
    assert executor_of(averages[1].module) is None


def test_two_models_alternating() -> None:
    """Two wrapped models whose steps alternate, and whose graphs are alive at once."""
    pairs = [(make(), make()), (make(lambda: Net(3)), make(lambda: Net(3)))]
    for i, (_, ours) in enumerate(pairs):
        memscale.wrap(ours, config_of([Mode.BALANCED, Mode.AGGRESSIVE][i]))

    def drive_both(a: nn.Module, b: nn.Module) -> Record:
        record = Record()
        torch.manual_seed(3)
        for step in range(STEPS):
            first, second = loss_of(a, batch(step)), loss_of(b, batch(step))
            third = loss_of(a, batch(step + 1))
            second.backward()
            (first + third).backward()
            for model in (a, b):
                record.gradients(model)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad
                model.zero_grad()
        return record

    assert_same(
        drive_both(pairs[0][0], pairs[1][0]), drive_both(pairs[0][1], pairs[1][1])
    )
    for _, ours in pairs:
        assert executor_of(ours).stats().saves_dropped > 0


def test_a_model_that_reads_another() -> None:
    """Distillation: a wrapped teacher, called without gradients inside of the loss."""
    teachers = [make(), memscale.wrap(make(), config_of())]

    def distil(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        teacher = teachers[hasattr(model, "_memscale_executor")]
        with torch.no_grad():
            target = teacher.eval()(x)
        return nn.functional.mse_loss(model(x), target)

    check_twins(steps(distil), Mode.BALANCED)
    assert executor_of(teachers[1]).stats().ops_recorded == 0


# ---- copies ----


def copies(model: nn.Module) -> dict[str, nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_copy_is_not_wrapped_and_can_be(how: str, trained: bool) -> None:
    """It computes by itself, can be wrapped, and detach leaves nothing of ours."""
    plain, ours = make(), memscale.wrap(make(), config_of())
    if trained:
        assert_same(run(steps(), plain), run(steps(), ours))
    twin, copied = copies(plain)[how], copies(ours)[how]
    recorded = executor_of(ours).stats().ops_recorded
    assert not replay.is_attached(copied)
    assert executor_of(copied) is None
    assert_same(run(steps(), twin), run(steps(), copied))
    assert executor_of(ours).stats().ops_recorded == recorded
    memscale.wrap(copied, config_of(Mode.AGGRESSIVE))
    assert_same(run(steps(), twin), run(steps(), copied))
    assert executor_of(copied).stats().saves_dropped > 0
    memscale.detach(copied)
    assert_as_never_wrapped(copied, twin)


@pytest.mark.parametrize("verified", [False, True])
def test_a_pickle_names_nothing_of_ours(verified: bool) -> None:
    """It can be loaded where memscale is not installed."""
    model = memscale.wrap(make(), config_of(verify_correctness=verified))
    for _ in range(2):
        named = {str(arg) for _, arg, _ in pickletools.genops(pickle.dumps(model))}
        assert [n for n in named if "memscale" in n] == ["_memscale_executor"]
        model(batch()).sum().backward()


def test_detach_of_a_copy_leaves_nothing() -> None:
    model = make()
    twin = copy.deepcopy(model)
    copied = copy.deepcopy(memscale.wrap(model, config_of()))
    memscale.detach(copied)
    assert_as_never_wrapped(copied, twin)
    assert executor_of(model) is not None


def test_a_copy_while_the_first_batch_is_to_be_verified() -> None:
    model = memscale.wrap(make(), config_of(verify_correctness=True))
    plain = make()
    for copied in copies(model).values():
        assert_same(
            run(steps(count=1), copy.deepcopy(plain)), run(steps(count=1), copied)
        )


def test_state_dict() -> None:
    """The same keys in the same order; loaded in both directions, in any mode."""
    plain, ours = make(), memscale.wrap(make(), config_of(Mode.AGGRESSIVE))
    assert_same(run(steps(), plain), run(steps(), ours))
    assert list(plain.state_dict()) == list(ours.state_dict())
    for assign in (False, True):
        fresh = [make(), memscale.wrap(make(), config_of())]
        for target, source in zip(fresh, (ours, plain), strict=True):
            state = copy.deepcopy(source.state_dict())
            assert not any(target.load_state_dict(state, assign=assign))
        assert_same(run(steps(), fresh[0]), run(steps(), fresh[1]))
        assert executor_of(fresh[1]).stats().saves_dropped > 0


def test_resumed_training(tmp_path: Any) -> None:
    """Saved half-way from a wrapped model, loaded into a wrapped one."""

    def half(model: nn.Module, record: Record, path: Any, load: bool) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if load:
            saved = torch.load(path)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in range(STEPS):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path)

    def drive(wrapped: bool) -> Record:
        path = tmp_path / f"{wrapped}.pt"
        torch.manual_seed(3)
        record = Record()
        for load in (False, True):
            model = make()
            if wrapped:
                memscale.wrap(model, config_of(Mode.AGGRESSIVE))
            torch.manual_seed(4)
            half(model, record, path, load)
            record.state(model)
        return record

    assert_same(drive(False), drive(True))


def test_scripted_or_exported_after_wrap() -> None:
    """torch.export and torch.jit.trace see the model's own ops only."""
    plain, ours = make().eval(), memscale.wrap(make(), config_of()).eval()
    exported = [torch.export.export(m, (batch(),)) for m in (plain, ours)]
    targets = [[str(n.target) for n in e.graph.nodes] for e in exported]
    assert targets[0] == targets[1]
    traced = [torch.jit.trace(m, (batch(),)) for m in (plain, ours)]
    assert torch.equal(traced[0](batch()), traced[1](batch()))
    assert executor_of(ours).plans == []
