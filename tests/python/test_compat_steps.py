"""What training loops do with a wrapped model: each the same as without, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
from compat_twins import (
    STEPS,
    Block,
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


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


@each_mode
def test_plain_loop(mode: Mode) -> None:
    executor = check_twins(steps(), mode)
    assert len(executor.plans) == 1
    assert executor.stats().ops_replayed > 0


def test_plain_loop_on_sim(sim: torch.device) -> None:
    check_twins(steps(device=sim), Mode.AGGRESSIVE, device=sim)


@each_mode
def test_gradient_accumulation(mode: Mode) -> None:
    def drive(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2 * STEPS):
            loss = loss_of(model, batch(step)) / 2
            record("loss", loss)
            loss.backward()
            record.gradients(model)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

    check_twins(drive, mode)


@each_mode
def test_losses_of_several_forwards(mode: Mode) -> None:
    check_twins(steps(lambda m, x: loss_of(m, x) + loss_of(m, 2 * x)), mode)


@each_mode
def test_retain_graph(mode: Mode) -> None:
    def drive(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            loss = loss_of(model, batch(step))
            loss.backward(retain_graph=True)
            record.gradients(model)
            loss.backward()
            record.gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    check_twins(drive, mode)


@each_mode
def test_autograd_grad(mode: Mode) -> None:
    def drive(model: nn.Module, record: Record) -> None:
        x = batch().requires_grad_()
        for _ in range(STEPS):
            wanted = [x, *model.parameters()]
            for gradient in torch.autograd.grad(loss_of(model, x), wanted):
                record("gradient", gradient)

    check_twins(drive, mode)


@each_mode
def test_double_backward(mode: Mode) -> None:
    """A gradient penalty."""

    def loss_with_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        loss = loss_of(model, x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    check_twins(steps(loss_with_penalty), mode)


@each_mode
def test_autocast(mode: Mode) -> None:
    def under_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, x)

    executor = check_twins(steps(under_autocast), mode)
    assert len(executor.plans) == 1


def test_autocast_on_sim(sim: torch.device) -> None:
    def under_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("sim", torch.bfloat16):
            return loss_of(model, x)

    drive = steps(under_autocast, device=sim)
    check_twins(drive, Mode.BALANCED, device=sim)


@each_mode
def test_grad_scaler(mode: Mode) -> None:
    def drive(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        for step in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch(step))
            if step == 1:
                loss = loss * float("inf")  # a step that is skipped
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            record("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            record("scale", torch.tensor(scaler.get_scale()))

    check_twins(drive, mode)


@each_mode
def test_clipping_and_schedulers(mode: Mode) -> None:
    def drive(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
        for step in range(STEPS):
            loss_of(model, batch(step)).backward()
            record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            record.gradients(model)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            record("rate", torch.tensor(scheduler.get_last_lr()))

    check_twins(drive, mode)


@each_mode
def test_closure(mode: Mode) -> None:
    """LBFGS calls the model several times in a step."""

    def drive(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch())
            loss.backward()
            record("loss", loss)
            return loss

        for _ in range(2):
            optimizer.step(closure)

    check_twins(drive, mode)


@each_mode
def test_optimizer_in_backward(mode: Mode) -> None:
    def drive(model: nn.Module, record: Record) -> None:
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles = [
            p.register_post_accumulate_grad_hook(update) for p in model.parameters()
        ]
        for step in range(STEPS):
            loss = loss_of(model, batch(step))
            record("loss", loss)
            loss.backward()
        for handle in handles:
            handle.remove()

    check_twins(drive, mode)


@each_mode
def test_freezing_and_unfreezing(mode: Mode) -> None:
    def drive(model: nn.Module, record: Record) -> None:
        for frozen in (True, False, True):
            model.first.requires_grad_(not frozen)
            model.blocks[0].requires_grad_(not frozen)
            steps(count=2)(model, record)

    check_twins(drive, mode)


@each_mode
def test_changing_dtype(mode: Mode) -> None:
    def drive(model: nn.Module, record: Record) -> None:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model.to(dtype)
            steps(lambda m, x, t=dtype: loss_of(m, x.to(t)))(model, record)

    executor = check_twins(drive, mode)
    assert len(executor.plans) == 3


def test_half_after_wrap() -> None:
    def drive(model: nn.Module, record: Record) -> None:
        model.half()
        steps(lambda m, x: loss_of(m, x.half()), count=1)(model, record)

    check_twins(drive, Mode.AGGRESSIVE)


@each_mode
def test_moved_after_wrap(mode: Mode, sim: torch.device) -> None:
    def drive(model: nn.Module, record: Record) -> None:
        steps()(model, record)
        model.to(sim)
        steps(device=sim)(model, record)
        model.to("cpu")
        steps()(model, record)

    check_twins(drive, mode)


def test_changing_shapes_are_planned_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is nowhere larger than one before needs no plan of its own."""
    from memscale.attach import planner as module

    calls = []
    question_of = module.question_of
    monkeypatch.setattr(
        module,
        "question_of",
        lambda *args, **facts: calls.append(args) or question_of(*args, **facts),
    )
    sizes = [320, 256, 320, 400, 384, 400]

    def drive(model: nn.Module, record: Record) -> None:
        for rows in sizes:
            loss_of(model, batch(rows=rows)).backward()
            record.gradients(model)
            model.zero_grad()

    executor = check_twins(drive, Mode.BALANCED)
    assert len(calls) == len(executor.plans) == 2  # 320 and 400
    assert executor.plan is executor.plans[1]


def test_other_arguments_are_planned_once_each() -> None:
    class TwoWays(Net):
        def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
            x = super().forward(x)
            return x + x if twice else x

    def drive(model: nn.Module, record: Record) -> None:
        for twice in (False, True, False, True):
            model(batch(), twice=twice).square().mean().backward()
            record.gradients(model)
            model.zero_grad()

    executor = check_twins(drive, Mode.BALANCED, TwoWays)
    assert len(executor.plans) == 2


@each_mode
def test_evaluation_between_steps(mode: Mode) -> None:
    def drive(model: nn.Module, record: Record) -> None:
        for context in (torch.no_grad, torch.inference_mode):
            steps(count=1)(model, record)
            model.eval()
            with context():
                record("evaluated", model(batch()))
            model.train()

    check_twins(drive, mode)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_recorded_without_gradients(context: type, training: bool) -> None:
    model = make()
    memscale.wrap(model, config_of())
    executor = executor_of(model)
    model.train(training)
    with context():
        model(batch())
    assert executor.stats().ops_recorded == 0
    assert executor.stats().saves_kept == 0
    assert executor.plan is None
    assert executor.plans == []


@each_mode
def test_weights_changed_by_hand(mode: Mode) -> None:
    """Between steps, as initialisers, weight decay and EMA do."""

    def drive(model: nn.Module, record: Record) -> None:
        for _ in range(2):
            steps(count=1)(model, record)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            model.head.weight.data.clamp_(-0.05, 0.05)

    check_twins(drive, mode)


@each_mode
def test_a_batch_with_a_gradient(mode: Mode) -> None:
    """Adversarial training: the batch is changed by its own gradient."""

    def drive(model: nn.Module, record: Record) -> None:
        x = batch().requires_grad_()
        for _ in range(STEPS):
            loss_of(model, x).backward()
            record("gradient of the batch", x.grad)
            with torch.no_grad():
                x += 0.01 * x.grad.sign()
            x.grad = None

    check_twins(drive, mode)


def test_adapter_modules_added_after_wrap() -> None:
    """A module that is replaced after wrap runs, and trains, as it would."""

    def drive(model: nn.Module, record: Record) -> None:
        steps(count=1)(model, record)
        torch.manual_seed(1)
        model.blocks[1] = Block()
        model.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(64, 8))
        steps()(model, record)

    check_twins(drive, Mode.AGGRESSIVE)


def test_same_seed_after_many_steps() -> None:
    plain, ours = make(), memscale.wrap(make(), config_of(Mode.AGGRESSIVE))
    assert_same(run(steps(count=12), plain), run(steps(count=12), ours))
