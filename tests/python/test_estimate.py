"""memscale.estimate: bytes as a real step takes them, and a model left alone."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import models
from memscale import hardware
from memscale.benchmarks.measure import measure_peak
from models import loss_of, mlp

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

KIB = 1 << 10
MIB = 1 << 20


class TestPeak:
    @pytest.mark.parametrize("device", ["cpu", "sim"])
    @pytest.mark.parametrize("name", models.MODELS)
    def test_is_that_of_a_real_step(
        self, name: str, device: str, sim: torch.device
    ) -> None:
        make, batch = models.MODELS[name]
        torch.manual_seed(0)
        model, sample = make(), batch()
        for factory in (
            torch.optim.AdamW,
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        ):
            predicted = memscale.estimate(model, sample, factory, device=device)
            measured = measure_peak(model, sample, None, factory, device, steps=2)
            error = predicted.peak_bytes - measured
            assert -measured / 100 <= error <= max(measured / 100, 4 * KIB)

    @pytest.mark.parametrize("device", ["cpu", "sim"])
    def test_is_exact_for_linear_layers(self, device: str, sim: torch.device) -> None:
        model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 128))
        sample = torch.randn(32, 256)
        factory = functools.partial(torch.optim.SGD, lr=0.1)
        estimate = memscale.estimate(
            model, sample, factory, loss_fn=torch.sum, device=device
        )
        measured = measure_peak(model, sample, torch.sum, factory, device)
        assert abs(estimate.peak_bytes - measured) <= 64  # single numbers

    def test_grows_with_the_batch_by_the_activations(self) -> None:
        model = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 8))
        peaks = [
            memscale.estimate(
                model, torch.randn(n, 8), "sgd", loss_fn=torch.sum
            ).phases["forward"]
            for n in (1000, 2000)
        ]
        # Input, the tanh's input and output (while it runs).
        assert peaks[1] - peaks[0] == 1000 * (8 + 1024 + 1024) * 4

    def test_in_lower_precision(self, sim: torch.device) -> None:
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64))
        model.to(torch.bfloat16)
        sample = torch.randn(32, 256, dtype=torch.bfloat16)
        estimate = memscale.estimate(model, sample, loss_fn=torch.sum, device="sim")
        measured = measure_peak(model, sample, torch.sum, torch.optim.AdamW, "sim")
        # The largest product's sums in float32: CPUs that multiply in bfloat16 hold
        # them tile by tile instead.
        sums = 256 * 512 * 4 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 0
        excess = estimate.peak_bytes - measured
        assert -measured / 100 <= excess <= measured / 100 + sums

    def test_under_autocast(self, sim: torch.device) -> None:
        class Cast(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(
                    nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
                )

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.autocast(x.device.type, torch.bfloat16):
                    return self.body(x).float().sum()

        for device in ("cpu", "sim"):
            model, sample = Cast(), torch.randn(64, 64)
            predicted = memscale.estimate(model, sample, device=device).peak_bytes
            measured = measure_peak(model, sample, None, torch.optim.AdamW, device)
            assert abs(predicted - measured) <= measured / 100

    def test_of_checkpointed_layers(self, sim: torch.device) -> None:
        model = models.gpt2()
        model.model.gradient_checkpointing_enable()
        model.train()
        sample = models.tokens()
        kept = memscale.estimate(models.gpt2(), sample, "sgd", device="sim")
        predicted = memscale.estimate(model, sample, "sgd", device="sim")
        measured = measure_peak(model, sample, None, torch.optim.SGD, "sim")
        assert abs(predicted.peak_bytes - measured) <= measured / 100
        assert predicted.peak_bytes < kept.peak_bytes


class TestParts:
    def test_sum_up(self, sim: torch.device) -> None:
        for device in ("cpu", "sim"):
            e = memscale.estimate(models.gpt2(), models.tokens(), device=device)
            assert sum(e.breakdown.values()) == e.peak_bytes
            assert max(e.phases.values()) == e.peak_bytes
            assert e.phases[e.peak_phase] == e.peak_bytes
            assert sum(share.bytes for share in e.layers) == e.peak_bytes
            for share in e.layers:
                assert sum(share.by_category.values()) == share.bytes
            sizes = [share.bytes for share in e.layers]
            assert sizes == sorted(sizes, reverse=True)
            assert e.peak_layer in [share.name for share in e.layers]
            assert [i.bytes for i in e.timeline][e.timeline.peak().op] == e.peak_bytes

    def test_of_what_is_known_beforehand(self) -> None:
        model = mlp()
        x = torch.randn(5, 8)
        bytes_of_parameters = sum(p.nbytes for p in model.parameters())
        e = memscale.estimate(model, x, "adamw")
        assert e.breakdown["parameters"] == bytes_of_parameters
        last = e.timeline[len(e.timeline) - 1].by_category
        assert last["gradients"] == bytes_of_parameters
        assert last["activations"] == 4  # the loss, which a loop still holds
        # Two moments and a step count for each of six tensors.
        assert last["optimizer_state"] == 2 * bytes_of_parameters + 6 * 4

    def test_between_steps(self) -> None:
        model, x = mlp(), torch.randn(5, 8)
        e = memscale.estimate(model, x, "adamw")
        parameters = sum(p.nbytes for p in model.parameters())
        state = 2 * parameters + 6 * 4
        assert e.timeline.resident == parameters + state + x.nbytes

    def test_as_a_dict(self) -> None:
        e = memscale.estimate(mlp(), torch.randn(5, 8), "sgd")
        data = e.to_dict()
        assert json.loads(e.to_json()) == data
        assert data["peak_bytes"] == e.peak_bytes
        assert data["call"] == "float32[5, 8] on cpu"
        assert data["optimizer"] == "SGD"
        assert data["method"] == "static"
        assert data["target"] == data["device"] == "cpu"
        assert data["peak"]["op"] == e.trace[e.timeline.peak().op].name
        assert f"{e.peak_bytes:,} bytes" in str(e)
        assert str(e.peak_bytes) in repr(e)

    def test_nothing_is_on_the_host_but_what_the_model_puts_there(
        self, sim: torch.device
    ) -> None:
        class ToHost(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(64, 64)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x).cpu().exp().sum()

        x = torch.randn(32, 64)
        on_cpu = memscale.estimate(ToHost(), x, None, device="cpu")
        assert on_cpu.host_peak_bytes == 0
        on_sim = memscale.estimate(ToHost(), x, None, device="sim")
        assert on_sim.host_peak_bytes >= 2 * 32 * 64 * 4
        plain = memscale.estimate(nn.Linear(64, 64), x, None, device="sim")
        assert plain.host_peak_bytes < KIB

    def test_does_it_fit(self) -> None:
        e = memscale.estimate(mlp(), torch.randn(5, 8))
        fit = e.fits("RTX 3090")
        assert fit.fits
        assert fit.capacity == hardware.find("RTX 3090").memory
        assert fit.needed == e.peak_bytes + fit.reserve
        with torch.device("meta"):
            large = nn.Linear(1 << 16, 1 << 15)  # 8 GiB, and as much for gradients
        e = memscale.estimate(large, torch.zeros(1, 1 << 16), device="RTX 3090")
        assert not e.fits("RTX 3090").fits
        assert e.target == hardware.find("RTX 3090").name
        assert e.fits(hardware.find("A100 80GB")).fits


# ---- what cannot be estimated ----


class TestBadInput:
    def test_not_a_module(self) -> None:
        with pytest.raises(TypeError, match=r"torch\.nn\.Module, got function"):
            memscale.estimate(lambda x: x, torch.randn(2))

    def test_no_parameters(self) -> None:
        estimate = memscale.estimate(nn.ReLU(), torch.randn(16, 4))
        assert estimate.loss.startswith("none")
        assert estimate.phases == {"forward": 2 * 16 * 4 * 4}
        assert estimate.breakdown["parameters"] == 0

    def test_no_ops(self) -> None:
        estimate = memscale.estimate(nn.Identity(), torch.randn(16, 4))
        assert estimate.peak_bytes == 16 * 4 * 4
        assert estimate.phases == {}
        assert estimate.peak_op is None
        assert estimate.layers == []
        assert str(estimate)

    def test_all_frozen(self) -> None:
        model = mlp().requires_grad_(False)
        estimate = memscale.estimate(model, torch.randn(5, 8))
        assert estimate.loss.startswith("none")
        assert set(estimate.phases) == {"forward"}
        parameters = sum(p.nbytes for p in model.parameters())
        assert estimate.breakdown["parameters"] == parameters

    def test_frozen_with_a_loss(self) -> None:
        model = mlp().requires_grad_(False)
        estimate = memscale.estimate(model, torch.randn(5, 8), loss_fn=loss_of)
        assert estimate.loss.startswith("loss_fn, but it needs no gradient")
        assert set(estimate.phases) == {"forward"}

    def test_on_two_devices(self, sim: torch.device) -> None:
        model = mlp()
        model[2].to(sim)
        x = torch.randn(5, 8)
        with pytest.raises(memscale.TraceError, match=r"one device, got cpu and sim"):
            memscale.estimate(model, x)
        # Asked for one device, it is estimated there.
        assert (
            memscale.estimate(model, x, device="cpu").trace
            == memscale.estimate(mlp(), x, device="cpu").trace
        )

    def test_scripted(self) -> None:
        scripted = torch.jit.trace(mlp(), torch.randn(5, 8))
        with pytest.raises(memscale.TraceError, match="scripted"):
            memscale.estimate(scripted, torch.randn(5, 8))

    def test_lazy(self) -> None:
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
        with pytest.raises(memscale.TraceError, match=r"0\.weight has no shape yet"):
            memscale.estimate(model, torch.randn(5, 8))
        model(torch.randn(5, 8))
        assert memscale.estimate(model, torch.randn(5, 8)).peak_bytes > 0

    def test_a_wrong_shape_is_the_models_error_and_says_the_call(self) -> None:
        with pytest.raises(RuntimeError, match="same reduction dim") as caught:
            memscale.estimate(mlp(), torch.randn(5, 7))
        assert not isinstance(caught.value, memscale.Error)
        assert caught.value.__notes__ == [
            "memscale called the model with float32[5, 7] on cpu"
        ]

    def test_wrong_arguments_are_the_models_error_and_say_the_call(self) -> None:
        with pytest.raises(TypeError) as caught:
            memscale.estimate(mlp(), {"input": torch.randn(5, 8), "extra": 3})
        (note,) = caught.value.__notes__
        assert note.endswith("with input=float32[5, 8] on cpu, extra=3")

    def test_an_unknown_optimizer(self) -> None:
        with pytest.raises(memscale.InputError, match=r"adamw.*got 'adamx'"):
            memscale.estimate(mlp(), torch.randn(5, 8), "adamx")
        with pytest.raises(memscale.InputError, match=r"torch\.optim\.Optimizer, got"):
            memscale.estimate(mlp(), torch.randn(5, 8), lambda parameters: 3)

    def test_an_optimizer_of_another_model(self) -> None:
        optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
        with pytest.raises(memscale.InputError, match=r"got 6 others.*\[16, 8\]"):
            memscale.estimate(mlp(), torch.randn(5, 8), optimizer)

    def test_an_unknown_device(self) -> None:
        with pytest.raises(memscale.HardwareError, match="RTX 3091"):
            memscale.estimate(mlp(), torch.randn(5, 8), device="RTX 3091")
        with pytest.raises(memscale.InputError, match="meta"):
            memscale.estimate(mlp(), torch.randn(5, 8), device="meta")

    @pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
    @pytest.mark.parametrize("name", ["batch", "length"])
    def test_a_bad_size(self, name: str, value: Any) -> None:
        with pytest.raises(memscale.InputError, match=f"{name} must be a positive"):
            memscale.estimate(mlp(), **{name: value})

    def test_a_loss_that_is_none(self) -> None:
        with pytest.raises(memscale.InputError, match=r"single number, got float32"):
            memscale.estimate(mlp(), torch.randn(5, 8), loss_fn=lambda out: out)
        with pytest.raises(memscale.InputError, match="single number, got None"):
            memscale.estimate(mlp(), torch.randn(5, 8), loss_fn=lambda out: None)

    def test_what_cannot_be_copied(self) -> None:
        class Locked(nn.Linear):
            def __init__(self) -> None:
                super().__init__(8, 4)
                self.lines = iter(open(__file__))  # noqa: SIM115

        with pytest.raises(memscale.TraceError, match="Locked cannot be copied"):
            memscale.estimate(Locked(), torch.randn(5, 8))

    def test_a_sparse_parameter(self) -> None:
        model = nn.Linear(4, 4)
        model.register_buffer("adjacency", torch.eye(4).to_sparse())
        with pytest.raises(memscale.TraceError, match="sparse"):
            memscale.estimate(model, torch.randn(2, 4))

    def test_what_torch_compile_made(self) -> None:
        model, x = mlp(), torch.randn(5, 8)
        compiled = torch.compile(model, backend="eager")
        assert memscale.estimate(compiled, x).trace == memscale.estimate(model, x).trace
