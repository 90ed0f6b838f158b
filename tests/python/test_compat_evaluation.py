"""Evaluation of a wrapped model is torch's own; and nothing of ours stays behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memscale
from compat_twins import (
    Block,
    Net,
    assert_same,
    batch,
    check_twins,
    config_of,
    executor_of,
    make,
    run,
    steps,
    untouched_process,  # noqa: F401
)
from memscale import OptimizationMode as Mode
from memscale import replay
from never_wrapped import assert_as_never_wrapped

WIDTH, LENGTH = 64, 40
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
)


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x, mask))
        return out


def sequence() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, nn.Transformer.generate_square_subsequent_mask(LENGTH)


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ops_and_output(model: nn.Module) -> tuple[list[str], torch.Tensor]:
    with Ops() as ops:
        output = model(*sequence())
    return ops.names, output


def assert_no_hooks(model: nn.Module) -> None:
    assert not any(getattr(m, hooks) for m in model.modules() for hooks in _HOOKS)


each_build = pytest.mark.parametrize("build", [Classifier, encoder, layer])


# ---- torch's fast path ----


@each_build
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_takes_the_fast_path(build: Any, mode: Any) -> None:
    """Before, between and after steps of training: the same ops, the same bits."""
    plain, ours = make(build), memscale.wrap(make(build), config_of())
    for _ in range(3):
        with mode():
            expected = ops_and_output(plain.eval())
            found = ops_and_output(ours.eval())
        assert "aten._transformer_encoder_layer_fwd.default" in expected[0]
        assert expected[0] == found[0]
        assert torch.equal(expected[1], found[1])
        for model in (plain, ours):
            torch.manual_seed(2)
            model.train()(*sequence()).square().mean().backward()
    assert executor_of(ours).stats().saves_dropped > 0
    memscale.detach(ours)
    assert_as_never_wrapped(ours.train(), plain.train())


def test_a_frozen_encoder_takes_the_fast_path_in_training() -> None:
    """Only its head is trained: torch takes the fast path though gradients are on."""

    def frozen() -> nn.Module:
        model = Classifier()
        model.encoder.requires_grad_(False)
        return model

    plain, ours = make(frozen), memscale.wrap(make(frozen), config_of())
    plain.encoder.eval()
    ours.encoder.eval()
    expected, found = ops_and_output(plain)[1], ours(*sequence())
    assert torch.equal(expected, found)
    for output in (expected, found):
        output.square().mean().backward()
    assert torch.equal(plain.head.weight.grad, ours.head.weight.grad)


def test_a_part_that_is_evaluated_takes_the_fast_path() -> None:
    plain, ours = make(Classifier), memscale.wrap(make(Classifier), config_of())
    with torch.no_grad():
        expected = ops_and_output(plain.encoder.eval())
        found = ops_and_output(ours.encoder.eval())
    assert expected[0] == found[0]
    assert torch.equal(expected[1], found[1])


# ---- nothing stays behind ----


@each_build
def test_no_hook_is_ours(build: Callable[[], nn.Module]) -> None:
    """Neither at rest nor inside of a call in training."""
    model = make(build)
    memscale.wrap(model, config_of())
    assert_no_hooks(model)
    forward = model.forward

    def looking(*args: Any, **kwargs: Any) -> Any:
        assert_no_hooks(model)
        return forward(*args, **kwargs)

    model.forward = looking
    model(*sequence()).square().mean().backward()
    assert executor_of(model).stats().saves_dropped > 0
    assert_no_hooks(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("hooked", [False, True])
def test_nothing_stays_after_an_error_in_forward(error: Any, hooked: bool) -> None:
    class Failing(Block):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise error
            return super().forward(x)

    def build() -> nn.Module:
        model = Net(block=Failing)
        if hooked:
            model.blocks[1].register_forward_pre_hook(_nothing)
        return model

    plain, ours = make(build), memscale.wrap(make(build), config_of())
    ours.blocks[1].fails = True
    with pytest.raises(error):
        ours(batch())
    assert replay._of_thread.call is None
    hooks = [hook for m in ours.modules() for hook in m._forward_pre_hooks.values()]
    assert hooks == [_nothing] * hooked
    assert not any(m._forward_hooks for m in ours.modules())
    del ours.blocks[1].fails
    plain.load_state_dict(ours.state_dict())
    assert_same(run(steps(), plain), run(steps(), ours))
    memscale.detach(ours)
    assert_as_never_wrapped(ours, plain)


def _nothing(*_: Any) -> None:
    pass


# ---- hooks of users ----


def test_hooks_of_the_user_run_in_their_order() -> None:
    """Registered before and after wrap, in front and at the end, removed by handle."""
    log: list[str] = []

    def hooks_on(module: nn.Module, name: str) -> list[Any]:
        def note(what: str) -> Any:
            return lambda *_: log.append(f"{what} {name}")

        return [
            module.register_forward_pre_hook(note("before")),
            module.register_forward_pre_hook(note("first"), prepend=True),
            module.register_forward_hook(note("after")),
            module.register_forward_hook(note("always"), always_call=True),
        ]

    logs = []
    for wrapped in (False, True):
        model = make()
        handles = hooks_on(model, "model 1") + hooks_on(model.blocks[0], "block 1")
        if wrapped:
            memscale.wrap(model, config_of())
        handles += hooks_on(model, "model 2") + hooks_on(model.blocks[0], "block 2")
        for _ in range(2):
            model(batch()).sum().backward()
            handles.pop(0).remove()
            handles.pop().remove()
        logs.append(list(log))
        log.clear()
        if wrapped:
            assert executor_of(model).stats().saves_dropped > 0
    assert logs[0] == logs[1]


def test_hooks_that_compute_do_not_break_the_plan() -> None:
    """What a pre-hook computes is not the layer's: its ops are as planned."""

    def build() -> nn.Module:
        model = Net()
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, a: (a[0] * 2 + 1,))
        return model

    ours = memscale.wrap(make(build), config_of(Mode.AGGRESSIVE))
    ours(batch()).square().mean().backward()
    # That of the model itself, which has two ops more.
    assert executor_of(ours).stats().calls_unlike_keep_set <= 1


# ---- others who call ----


def test_parts_that_are_called_alone_recompute() -> None:
    """As in a loop that calls the layers itself, or a module without a forward."""

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(model.first(x))
        return model.head(x).square().mean()

    check_twins(steps(loss_of), Mode.BALANCED)


def test_a_copy_with_the_same_attributes_is_not_recorded() -> None:
    """As DataParallel makes them: they must not run the original's parameters."""
    ours = memscale.wrap(make(), config_of())

    def replica_of(module: nn.Module) -> nn.Module:
        made = module._replicate_for_data_parallel()
        for name, part in module._modules.items():
            made._modules[name] = replica_of(part)
        for name, parameter in module._parameters.items():
            made._parameters[name] = nn.Parameter(parameter.detach() * 2)
        return made

    plain = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter *= 2
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            plain.eval(), ours.eval()
            assert torch.equal(replica_of(ours)(batch()), plain(batch()))
    assert executor_of(ours).stats().ops_recorded == 0
    ours.train()(batch()).sum().backward()
    assert executor_of(ours).stats().saves_dropped > 0


# ---- CUDA graphs ----


def test_calls_in_the_capture_of_a_cuda_graph_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = memscale.wrap(make(), config_of())
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    model(batch()).sum().backward()
    model.blocks[0](batch()).sum().backward()
    assert executor_of(model).plans == []
    assert executor_of(model).stats().ops_recorded == 0
    capturing = False
    model(batch()).sum().backward()
    assert len(executor_of(model).plans) == 1
    assert executor_of(model).stats().saves_dropped > 0


def test_nobody_asks_for_captures_where_cuda_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked() -> bool:
        raise AssertionError("this would start CUDA")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    model = memscale.wrap(make(), config_of())
    model(batch()).sum().backward()
    assert executor_of(model).stats().saves_dropped > 0


@pytest.mark.parametrize("gradients", [False, True])
def test_a_module_with_the_attributes_of_a_layer_runs_itself(gradients: bool) -> None:
    """As surgery does: a new class over the old one's attributes."""

    class Negated(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    model = memscale.wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), config_of())
    old = model[0]
    new = Negated.__new__(Negated)
    new.__dict__.update(old.__dict__)
    x = torch.randn(2, 4)
    with torch.set_grad_enabled(gradients):
        assert torch.equal(new(x), -old(x))


def test_a_part_that_outlives_its_model_is_wrapped_again() -> None:
    model = memscale.wrap(nn.Sequential(encoder(), nn.Linear(WIDTH, 4)), config_of())
    part = model[0]
    del model
    memscale.wrap(part, config_of())
    memscale.detach(part)
