"""verify_correctness: what is the same passes, what is not is found and named."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memscale
import models
from memscale import replay
from memscale.verify import VerifyError
from memscale.verify import verify_correctness as verify
from stand_in import LAYERS, Block, StandIn, batch, net

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


# ---- what is the same ----


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("policy", ["cheap", "block"])
@pytest.mark.parametrize("name", models.MODELS)
def test_replay_passes(name: str, policy: str, device: str) -> None:
    make, make_batch = models.MODELS[name]
    torch.manual_seed(1)
    model, sample = make().to(device), make_batch()
    report = verify(model, sample, policy=policy, min_bytes=0)
    assert report.passed, report
    assert report.how == "full step"
    assert report.loss_equal is True
    assert report.saves_dropped is not None
    assert report.saves_dropped > 0
    gradients = sum(1 for _ in model.parameters())
    buffers = sum(1 for _ in model.buffers())
    # Loss, output and the random states of two devices beside them.
    assert report.num_compared == gradients + buffers + 4
    assert report.untrained == {}
    assert not hasattr(model, "_memscale_executor")


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_wrap_passes(device: str) -> None:
    model = net().to(device)
    report = verify(model, batch())
    assert report.passed, report
    assert report.loss_source.startswith("a stand-in")
    memscale.wrap(model)
    assert verify(model, batch()).passed
    memscale.detach(model)


def test_built_sample() -> None:
    report = verify(models.gpt2().model, policy="cheap", min_bytes=0)
    assert report.passed, report
    assert report.call.startswith("input_ids=int64[2, 48]")
    assert any("built" in note for note in report.notes)


def test_autocast() -> None:
    model = net()
    with torch.autocast("cpu", torch.bfloat16):
        report = verify(model, batch(), policy="block", min_bytes=0)
        assert torch.is_autocast_enabled("cpu")
    assert report.passed, report


def test_loss_fn_with_parameters() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (self.scale * output - target).square().mean()

    model, loss = net(), Loss()
    StandIn(model)
    report = verify(model, (batch(), torch.ones(8, 4)), loss_fn=loss)
    assert report.passed
    assert report.loss_source == "loss_fn"
    assert loss.scale.grad is None
    assert report.untrained == {}


def test_gradients_of_inputs_are_compared() -> None:
    model = net()
    StandIn(model, wrong="stem")
    x = batch().requires_grad_()
    names = {d.name for d in verify(model, x).differing}
    assert "gradient of stem.weight" in names
    StandIn(model := net())
    with_input = verify(model, x).num_compared
    assert with_input == verify(model, x.detach()).num_compared + 1
    assert x.grad is None


# ---- what is not ----


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("layer", LAYERS)
def test_wrong_layer_is_named(layer: str, device: str) -> None:
    model = net().to(device)
    StandIn(model, wrong=layer)
    report = verify(model, batch())
    assert not report.passed
    assert report.first_differing_layer == layer
    assert report.loss_equal is True  # the forward is right
    assert all(d.name.startswith("gradient of ") for d in report.differing)
    assert all(0 < d.max_abs < 1 for d in report.differing)
    # What comes after it, in forward, is right.
    wrong = LAYERS.index(layer)
    named = " ".join(d.name for d in report.differing)
    assert not any(f" {late}." in named for late in LAYERS[wrong + 1 :])
    with pytest.raises(VerifyError, match=f"first differing layer: {layer}") as error:
        report.raise_if_failed()
    assert error.value.report is report
    assert isinstance(error.value, memscale.Error)


def test_wrong_op_outside_of_layers() -> None:
    model = net()
    StandIn(model, wrong="")
    report = verify(model, batch())
    assert report.first_differing_layer == ""
    assert "(the model itself)" in str(report)


def test_replay_that_unpacks_wrongly_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real engine, but what one layer saves comes back a little off."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(4)), nn.Linear(16, 4))
    handle = replay.attach(model, "block", min_bytes=0)
    model._memscale_executor = handle
    assert verify(model, batch()).passed
    pack, unpack = handle._hooks
    inside: list[bool] = []

    def wrong_unpack(saved: tuple[bool, Any]) -> torch.Tensor:
        tensor: torch.Tensor = unpack(saved[1])
        return tensor * 1.001 if saved[0] and tensor.is_floating_point() else tensor

    model[2].register_forward_pre_hook(lambda *_: inside.append(True))
    model[2].register_forward_hook(lambda *_: inside.clear())
    hooks = (lambda tensor: (bool(inside), pack(tensor)), wrong_unpack)
    monkeypatch.setattr(handle, "_hooks", hooks)
    report = verify(model, batch())
    assert not report.passed
    assert report.first_differing_layer == "2"
    monkeypatch.undo()
    assert verify(model, batch()).passed
    handle.detach()


def test_missing_gradient() -> None:
    class Cuts(nn.Module):
        executor: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.adapter = nn.Linear(16, 16)
            self.head = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.adapter(x)
            out: torch.Tensor = self.head(x.detach() if self.executor.on else x)
            return out

    model = Cuts()
    model.executor = StandIn(model)
    report = verify(model, batch())
    assert report.missing == ["adapter.weight", "adapter.bias"]
    assert report.differing == []
    assert not report.passed
    assert report.first_differing_layer == "head"  # whose input gets none
    assert "without their gradient (2)" in str(report)


def test_wrong_buffer_and_random_state() -> None:
    model = net()
    StandIn(model, in_forward=lambda: model.batch_norm.running_mean.add_(1))
    report = verify(model, batch())
    assert [d.name for d in report.differing] == ["buffer batch_norm.running_mean"]
    assert report.differing[0].max_abs == pytest.approx(0.9)

    model = models.mlp()
    StandIn(model, in_forward=lambda: torch.rand(1))
    report = verify(model, batch(width=8))
    assert [d.name for d in report.differing] == ["random state of cpu"]


def test_wrapped_error_is_a_finding() -> None:
    def fail() -> None:
        raise RuntimeError("the engine is broken")

    model = net()
    StandIn(model, in_forward=fail)
    report = verify(model, batch())
    assert not report.passed
    assert report.error == "RuntimeError: the engine is broken"
    assert "raised RuntimeError: the engine is broken" in str(report)


def test_wrapped_backward_that_raises_names_the_layer() -> None:
    model = net()
    executor = StandIn(model, wrong="blocks.1")
    executor.raises = True
    report = verify(model, batch())
    assert not report.passed
    assert report.error == "RuntimeError: a save of blocks.1 is lost"
    assert report.first_differing_layer == "blocks.1"


def test_tolerance_is_for_what_is_lossy() -> None:
    model = models.mlp()
    x = batch(width=8)
    StandIn(model, wrong="4", off=1e-6)
    assert not verify(model, x).passed
    report = verify(model, x, tolerance=1e-3)
    assert report.passed
    assert report.tolerance == 1e-3
    assert "the same within 0.001" in str(report)
    model._memscale_executor.off = 0.5
    report = verify(model, x, tolerance=1e-3)
    assert report.first_differing_layer == "4"


def test_a_plain_step_that_differs_from_itself() -> None:
    class Noisy(nn.Module):
        """As if its kernels added atomically: never twice the same."""

        calls: ClassVar = [0.0]  # shared by the class: no state of the module

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.second = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.calls[0] += 1
            return self.first(x) + 1e-3 * self.calls[0] ** 2, self.second(x)

    def loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return output[0].sum() + output[1].square().sum()

    model = Noisy()
    StandIn(model)
    report = verify(model, batch(), loss_fn=loss)
    assert report.passed
    assert report.unchecked == ["output[0]", "loss"]
    assert any("plain steps" in note for note in report.notes)

    model = Noisy()
    StandIn(model, wrong="second", off=1.0)
    report = verify(model, batch(), loss_fn=loss)
    assert [d.name for d in report.differing] == ["gradient of second.weight"]


# ---- parameters that learn nothing ----


class LoRA(nn.Module):
    def __init__(self, connected: bool) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.base.requires_grad_(False)
        self.down = nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, 16, bias=False)
        self.connected = connected

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted = self.up(self.down(x))
        return torch.tanh(
            self.base(x) + (adapted if self.connected else adapted.detach())
        )


def test_untrained_adapter_is_named() -> None:
    model = nn.Sequential(LoRA(True), LoRA(False), LoRA(True))
    report = verify(model, batch(), policy="cheap", min_bytes=0)
    assert report.passed
    assert list(report.untrained) == ["1.down.weight", "1.up.weight"]
    assert "not trained by this step (2)" in str(report)
    assert "1.down.weight: no gradient, plain or wrapped" in str(report)


def test_parameter_that_the_optimizer_does_not_hold() -> None:
    model = net()
    StandIn(model)
    held = [p for name, p in model.named_parameters() if name != "head.bias"]
    optimizer = torch.optim.AdamW(held)
    report = verify(model, batch(), optimizer=optimizer)
    assert report.untrained == {"head.bias": "in no group of the optimizer"}
    assert len(optimizer.state) == 0


# ---- arguments, texts, comparing ----


def test_wrong_arguments() -> None:
    model = net()
    with pytest.raises(TypeError, match="model must be"):
        verify("model", batch())
    with pytest.raises(TypeError, match="config must be"):
        verify(model, batch(), config={})
    with pytest.raises(memscale.InputError, match="config or policy"):
        verify(model, batch(), config=memscale.Config(), policy="block")
    with pytest.raises(memscale.InputError, match="min_bytes"):
        verify(model, batch(), min_bytes=0)
    with pytest.raises(memscale.InputError, match="tolerance"):
        verify(model, batch(), tolerance=-1.0)
    with pytest.raises(memscale.InputError, match="sample_input is needed"):
        verify(model)
    with pytest.raises(memscale.InputError, match=r"0\.weight is on the meta device"):
        verify(models.mlp().to("meta"), batch())
    with pytest.raises(memscale.InputError, match="weight has no shape yet"):
        verify(nn.LazyLinear(4), batch())
    StandIn(model)
    with pytest.raises(memscale.InputError, match="wrapped already"):
        verify(model, batch(), policy="block")


def test_executor_that_does_not_pause() -> None:
    model = net()
    executor = StandIn(model)
    executor.paused = lambda: saved_tensors_hooks(executor._pack, executor._unpack)
    with pytest.raises(memscale.Error, match="not plain while its executor is paused"):
        verify(model, batch())


def test_a_step_that_drops_nothing_says_so() -> None:
    report = verify(net(), batch(), policy="keep")
    assert report.passed
    assert report.saves_dropped == 0
    assert any("dropped nothing" in note for note in report.notes)


def test_prediction_can_be_switched_off() -> None:
    config = memscale.Config(use_static_profiling=False)
    report = verify(net(), batch(), config=config)
    assert report.passed
    assert "its memory was not predicted: use_static_profiling is off" in report.notes


def test_text() -> None:
    model = net()
    StandIn(model, wrong="blocks.1")
    report = verify(model, batch())
    text = str(report).splitlines()
    assert text[0] == "MemScale: the wrapped step is NOT the same as the plain one"
    assert text[1] == "  how       full step"
    assert text[2] == "  call      model(float32[8, 16] on cpu)"
    assert text[4] == f"  compared  {report.num_compared} tensors"
    assert "  first differing layer: blocks.1" in text
    assert f"  differing ({len(report.differing)})" in text
    assert f"    and {len(report.differing) - 8} more" in text
    as_dict = report.to_dict()
    assert as_dict["passed"] is False
    assert as_dict["differing"][0] == {
        "name": report.differing[0].name,
        "max_abs": report.differing[0].max_abs,
    }
