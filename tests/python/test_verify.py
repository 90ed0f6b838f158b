"""verify_correctness: what is the same passes, what is not is found and named."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memscale
import models
from memscale._verify_compare import difference, within
from memscale.layers import find_layers
from memscale.verify import (
    FirstBatchCheck,
    VerifyError,
    verify_at_wrap,
    verify_correctness,
)

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

verify = verify_correctness


class StandIn:
    """An executor in Python that keeps saves on the host, and may be told to be wrong.

    ``wrong``: the layer whose saves come back a little off. ``in_forward`` is called
    in wrapped steps only.
    """

    def __init__(
        self,
        model: nn.Module,
        wrong: str | None = None,
        off: float = 1e-3,
        in_forward: Callable[[], object] | None = None,
    ) -> None:
        self.wrong, self.off, self.in_forward = wrong, off, in_forward
        self.on = True
        self.dropped = 0
        self._layers = [""]
        self._hooks: saved_tensors_hooks | None = None
        model.register_forward_pre_hook(self._begin)
        for name, module in find_layers(model).modules.items():
            module.register_forward_pre_hook(
                lambda _, args, name=name: self._layers.append(name)
            )
            module.register_forward_hook(self._leave, always_call=True)
        model.register_forward_hook(self._end, always_call=True)
        model._memscale_executor = self

    def _begin(self, model: nn.Module, args: Any) -> None:
        if self.on:
            if self.in_forward is not None:
                self.in_forward()
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def _leave(self, *_: Any) -> None:
        self._layers.pop()

    def _end(self, *_: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor, torch.device]:
        self.dropped += 1
        return self._layers[-1], tensor.cpu(), tensor.device

    def _unpack(self, packed: tuple[str, torch.Tensor, torch.device]) -> torch.Tensor:
        layer, there, device = packed
        tensor = there.to(device)
        if layer == self.wrong and tensor.is_floating_point():
            return tensor + self.off
        return tensor

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(saves_dropped=self.dropped, bytes_dropped=0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks, and layers outside of them; two use the same tensor."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.batch_norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        x = torch.sin(x)
        out: torch.Tensor = self.head(
            torch.tanh(self.left(x)) * self.right(x).sigmoid()
        )
        return out


LAYERS = ["stem", "batch_norm", "blocks.0", "blocks.2", "left", "right", "head"]


def net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(size: int = 8, width: int = 16) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(5))


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


@torch.library.custom_op("memscale_test::off_in_backward", mutates_args=())
def off_in_backward(x: torch.Tensor) -> torch.Tensor:
    """x * 2, but a little more if it is computed again in backward."""
    in_backward = torch._C._current_graph_task_id() != -1
    return x * (2.5 if in_backward else 2.0)


off_in_backward.register_autograd(lambda ctx, gradient: gradient * 2)


@off_in_backward.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Odd(nn.Module):
    """Its custom op is not a function of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.outer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.outer(off_in_backward(self.inner(x)).exp()))


def test_replay_that_is_wrong_is_caught() -> None:
    torch.manual_seed(0)
    members = [Block(16), Odd(), Block(16), Odd(), Block(16)]
    model = nn.Sequential(*members)
    report = verify(model, batch(), policy="block", min_bytes=0)
    assert not report.passed, "the op's result was kept: nothing was wrong"
    assert report.first_differing_layer == "3"


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


def test_tolerance_is_for_what_is_lossy() -> None:
    model = net()
    StandIn(model, wrong="head", off=1e-6)
    assert not verify(model, batch()).passed
    report = verify(model, batch(), tolerance=1e-3)
    assert report.passed
    assert report.tolerance == 1e-3
    assert "the same within 0.001" in str(report)
    model._memscale_executor.off = 0.5
    report = verify(model, batch(), tolerance=1e-3)
    assert report.first_differing_layer == "head"


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


# ---- as it was ----


class Stateful(nn.Module):
    """Everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16, max_norm=0.5)
        self.net = Net()
        self.target = nn.Linear(16, 16).requires_grad_(False)
        self.generator = torch.Generator().manual_seed(9)
        self.calls = 0
        self.seen: list[int] = []
        self.average = torch.zeros(16)
        self.register_buffer("swapped", torch.zeros(3))
        self.fails = ""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.extra = self.calls
        self.swapped = self.swapped + 1
        self.target.weight.data.mul_(0.5)
        x = self.embedding(ids)
        x = x + torch.rand(16, generator=self.generator).to(x.device)
        x = x + random.random() + torch.rand(16, device=x.device)
        self.average.mul_(0.9).add_(x.detach().mean(0).cpu())
        out = self.net(x) + self.target(x).sum()
        if self.fails == "forward" or (
            self.fails == "wrapped" and self._memscale_executor.on
        ):
            raise KeyError("as told")
        if self.fails == "backward":
            out.register_hook(lambda gradient: 1 / 0)
        return out


def picture(model: Stateful) -> dict[str, Any]:
    """Everything that must be the same afterwards; tensors as their bytes."""

    def bits(tensor: torch.Tensor) -> list[Any]:
        return [id(tensor), tensor.detach().cpu().flatten().view(torch.uint8).tolist()]

    taken: dict[str, Any] = {
        n: bits(t) for n, t in model.state_dict(keep_vars=True).items()
    }
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        taken[f"{name}.grad"] = None if gradient is None else bits(gradient)
        hooks = parameter._post_accumulate_grad_hooks
        taken[f"{name}.hooks"] = None if hooks is None else list(hooks.items())
    taken["modes"] = [module.training for module in model.modules()]
    taken["keys"] = [sorted(vars(module)) for module in model.modules()]
    taken["hooks"] = [
        [list(m._forward_hooks), list(m._forward_pre_hooks)] for m in model.modules()
    ]
    taken["plain"] = (model.calls, list(model.seen), bits(model.average))
    taken["generator"] = model.generator.get_state().tolist()
    taken["random"] = (
        random.getstate(),
        torch.get_rng_state().tolist(),
        torch.sim.get_rng_state().tolist(),
    )
    return taken


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("fails", ["", "forward", "wrapped", "backward"])
def test_everything_is_as_it_was(fails: str, device: str) -> None:
    torch.manual_seed(2)
    model = Stateful().to(device)
    StandIn(model)
    ids = torch.randint(12, (8,), device=device)
    for _ in range(2):  # gradients and statistics of a training that is under way
        model(ids).square().mean().backward()
    stepped: list[str] = []
    model.net.head.weight.register_post_accumulate_grad_hook(
        lambda parameter: stepped.append("optimizer in backward")
    )
    model.net.batch_norm.eval()
    model.fails = fails
    before = picture(model)
    if fails in ("forward", "backward"):
        with pytest.raises((KeyError, ZeroDivisionError)) as error:
            verify(model, ids)
        assert any("the plain model" in note for note in error.value.__notes__)
    else:
        report = verify(model, ids)
        assert report.passed == (fails == "")
        if fails:
            assert report.error == "KeyError: 'as told'"
    assert picture(model) == before
    assert stepped == []


def test_numpy_and_inputs_are_as_they_were() -> None:
    numpy = pytest.importorskip("numpy")

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(float(numpy.random.rand()))
            out: torch.Tensor = self.linear(x)
            return out

    model, x = Writes(), batch()
    StandIn(model)
    state = numpy.random.get_state()[1].tolist()
    report = verify(model, x)
    assert report.passed, report
    assert torch.equal(x, batch())
    assert numpy.random.get_state()[1].tolist() == state


def test_what_verify_attaches_it_detaches() -> None:
    torch.manual_seed(2)
    model = Stateful()
    before = picture(model)
    report = verify(
        model, torch.randint(12, (8,), generator=model.generator), policy="cheap"
    )
    model.generator.manual_seed(9)
    assert report.passed, report
    assert picture(model) == before
    model.fails = "forward"
    before = picture(model)
    with pytest.raises(KeyError):
        verify(model, torch.zeros(8, dtype=torch.long), policy="cheap")
    assert picture(model) == before


def test_eval_model_is_verified_in_training() -> None:
    model = net().eval()
    StandIn(model)
    report = verify(model, batch())
    assert report.passed
    assert not any(module.training for module in model.modules())
    assert report.num_compared == len(model.state_dict()) + 4


# ---- what does not fit ----


def needed(model: nn.Module, sample: Any, device: torch.device) -> int:
    """Bytes of the plain step; what is on the device before it included."""
    return memscale.estimate(model, sample, None, device=device).peak_bytes


def tokens_model(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(4)
    return models.WithLoss(
        nn.Sequential(
            nn.Embedding(models.VOCABULARY, 32),
            *(Block(32) for _ in range(4)),
            nn.Linear(32, models.VOCABULARY),
        )
    )


def test_smaller_batch(
    sim: torch.device, sim_of: Callable[[int | str], torch.device]
) -> None:
    model, (x, y) = tokens_model(), models.tokens(16, 64)
    enough = needed(model, (x[:4], y[:4]), sim)
    device = sim_of(enough + 65536)
    model.to(device)
    report = verify(model, (x, y), policy="block", min_bytes=0)
    assert report.how == "batch 4 of 16"
    assert report.why.startswith("the plain step needs ")
    assert report.passed, report
    assert report.call == "int64[4, 64] on cpu, int64[4, 64] on cpu"
    assert f"batch 4 of 16, because {report.why}" in str(report)


def test_shorter_sequence(
    sim: torch.device, sim_of: Callable[[int | str], torch.device]
) -> None:
    model, (x, y) = tokens_model(), models.tokens(2, 512)
    enough = needed(model, (x[:1, :128], y[:1, :128]), sim)
    device = sim_of(enough + 65536)
    model.to(device)
    report = verify(model, (x, y), policy="block", min_bytes=0)
    assert report.how == "batch 1 of 2, sequence 128 of 512"
    assert report.passed, report
    report = verify(model, (x[:1], y[:1]), policy="block", min_bytes=0)
    assert report.how == "sequence 128 of 512"


class Wide(nn.Module):
    """A few vectors, much inside: the batch cannot be 1, and nothing is a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))
        self.norm = nn.BatchNorm1d(512)
        self.blocks = nn.ModuleList([Block(512) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x * self.scale)
        x = x.expand(256, *x.shape)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("wrong", [None, "blocks.3"])
def test_block_by_block(
    wrong: str | None,
    sim: torch.device,
    sim_of: Callable[[int | str], torch.device],
) -> None:
    torch.manual_seed(6)
    model, sample = Wide(), torch.randn(2, 512)
    full = needed(model, sample, sim)
    blocks = sum(p.numel() * 4 for p in model.parameters())
    device = sim_of((full + blocks) // 2)
    model.to(device)
    if wrong is None:
        report = verify(model, sample, policy="block", min_bytes=0)
    else:
        StandIn(model, wrong=wrong)
        report = verify(model, sample)
    assert report.how == "block by block"
    assert report.loss_equal is None
    assert report.passed == (wrong is None), report
    assert report.first_differing_layer == wrong
    if wrong is not None:
        assert all(f"{wrong}" in d.name for d in report.differing)
    assert report.unchecked == ["parameter scale: in no layer that was run"]
    assert any("does not take batch 1 of 2: ValueError" in n for n in report.notes)
    assert report.untrained == {}


def test_out_of_memory_that_was_not_predicted(
    sim: torch.device, sim_of: Callable[[int | str], torch.device]
) -> None:
    class Decides(nn.Module):
        """Fake tensors cannot run it: a value decides."""

        def __init__(self) -> None:
            super().__init__()
            self.body = tokens_model()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if self.body.body[0].weight.sum().item() > 1e9:
                x = x + 1
            out: torch.Tensor = self.body(x, y)
            return out

    model, (x, y) = Decides(), models.tokens(16, 64)
    enough = needed(model.body, (x[:4], y[:4]), sim)
    device = sim_of(enough + 65536)
    model.to(device)
    report = verify(model, (x, y), policy="block", min_bytes=0)
    assert report.passed, report
    assert report.how == "batch 4 of 16"
    assert report.why == "the step ran out of memory"
    assert any("not predicted" in note for note in report.notes)


def test_block_by_block_of_layers_with_odd_arguments(
    sim: torch.device, sim_of: Callable[[int | str], torch.device]
) -> None:
    class Cache:
        def __init__(self) -> None:
            self.held: list[torch.Tensor] = []

    class Odds(nn.Module):
        """A shared layer, one that writes into its input, one that fills a cache."""

        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(512, 512)
            self.writes = nn.ReLU(inplace=True)
            self.fills = nn.ModuleList([Fills(), Fills()])
            self.norm = nn.BatchNorm1d(512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x).expand(512, *x.shape)
            x = self.writes(self.shared(self.shared(x)))
            cache = Cache()
            for layer in self.fills:
                x = layer(x, cache=cache)
            return x.square().mean()

    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            cache.held.append(torch.tanh(self.linear(x)))
            return torch.stack(cache.held).sum(0)

    torch.manual_seed(6)
    model, sample = Odds(), torch.randn(2, 512)
    full = needed(model, sample, sim)
    model.to(sim_of(full - 65536))
    report = verify(model, sample, policy="block", min_bytes=0)
    assert report.how == "block by block"
    assert report.passed, report
    assert report.unchecked == []
    # Of 2 calls of shared, 2 layers that fill, norm and writes: outputs, gradients of
    # inputs, of parameters; buffers of norm; 2 random states each.
    assert report.num_compared == 6 + (1 + 1 + 1 + 2 + 0 + 1) + 4 * 2 + 2 + 3 + 6 * 2


# ---- Config(verify_correctness=True) ----


def test_at_wrap_with_a_sample(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    executor = StandIn(model)
    with caplog.at_level("INFO", "memscale"):
        assert verify_at_wrap(model, executor, batch()) is None
    assert "bit for bit" in caplog.text
    executor.wrong = "blocks.1"
    with pytest.raises(VerifyError, match=r"blocks\.1"):
        verify_at_wrap(model, executor, batch())


def test_at_the_first_batch() -> None:
    model = net()
    executor = StandIn(model)
    hooks = list(model._forward_pre_hooks)
    check = verify_at_wrap(model, executor)
    assert isinstance(check, FirstBatchCheck)
    with torch.no_grad():
        model(batch())
    model.eval()(batch())
    memscale.estimate(model, batch(), None)  # traces a copy, with the same hooks
    assert not check.done
    model.train()
    torch.manual_seed(8)
    torch.rand(1)
    expected = torch.get_rng_state()
    torch.manual_seed(8)
    torch.rand(1)
    with executor.paused():
        mean = net()
        mean(batch())
    torch.set_rng_state(expected)
    model(batch())
    assert check.done
    assert check.report is not None
    assert check.report.passed
    assert list(model._forward_pre_hooks) == hooks
    # One batch was seen, not three.
    assert int(model.batch_norm.num_batches_tracked) == 2


def test_first_batch_of_a_wrong_model_raises() -> None:
    model = net()
    executor = StandIn(model, wrong="left")
    verify_at_wrap(model, executor)
    with pytest.raises(VerifyError, match="first differing layer: left"):
        model(batch())
    assert int(model.batch_norm.num_batches_tracked) == 0
    model(batch())  # said once


def test_check_can_be_cancelled() -> None:
    model = net()
    executor = StandIn(model, wrong="left")
    check = verify_at_wrap(model, executor)
    assert check is not None
    check.cancel()
    model(batch())
    assert check.report is None
    assert check.done


def test_config_field() -> None:
    model = net()
    memscale.wrap(model, memscale.Config(verify_correctness=True), batch())
    memscale.detach(model)
    memscale.wrap(model, memscale.Config(verify_correctness=True))
    model(batch()).sum().backward()
    assert int(model.batch_norm.num_batches_tracked) == 1
    memscale.detach(model)
    assert not model._forward_pre_hooks


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


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([NAN, 2.0], [NAN, 2.0], None),
        ([NAN, 2.0], [-NAN, 2.0], None),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([INF, 2.0], [INF, 2.0], None),
        ([INF, 2.0], [-INF, 2.0], INF),
        ([0.0], [-0.0], 0.0),
        ([1, 2], [1, 5], 3.0),
        ([True], [False], 1.0),
        ([1 + 2j], [1 + 4j], 2.0),
        ([1.0], [1], INF),
        ([1.0], [1.0, 2.0], INF),
    ],
)
def test_difference(a: list[Any], b: list[Any], expected: float | None) -> None:
    assert difference(torch.tensor(a), torch.tensor(b)) == expected


def test_difference_of_other_tensors() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
        a = torch.tensor([1.0, 2.0]).to(dtype)
        b = torch.tensor([1.0, 4.0]).to(dtype)
        assert difference(a, a.clone()) is None
        assert difference(a, b) == 2.0
    a = torch.eye(3).to_sparse()
    assert difference(a, torch.eye(3).to_sparse()) is None
    assert difference(a, (2 * torch.eye(3)).to_sparse()) == 1.0
    assert difference(a, torch.eye(3)) == math.inf
    left = torch.arange(6.0).view(2, 3)
    assert difference(left.t(), left.t().contiguous()) is None
    assert difference(torch.empty(0), torch.empty(0)) is None


def test_within() -> None:
    plain = torch.tensor([10.0, -100.0])
    assert within(None, plain, 0.0)
    assert not within(1.0, plain, 0.0)
    assert within(1.0, plain, 0.01)
    assert not within(1.0, plain, 0.009)
    assert not within(math.inf, plain, 0.5)
