"""A step recorded while it runs: the same trace as the one that is predicted."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from transformers import BertConfig, BertForMaskedLM

import memscale
import models
from memscale._C import Timeline, Trace
from memscale.benchmarks.measure import measure_peak
from memscale.estimation import estimate
from memscale.model.inputs import Call, read_call
from memscale.trace.recording import record_step
from memscale.trace.static import CannotTrace, _StaticTracer

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


def mlp() -> nn.Module:
    return models.WithLoss(
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, models.VOCABULARY))
    )


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 64), torch.randint(models.VOCABULARY, (32,))


def eager_bert() -> nn.Module:
    config = BertConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=48,
        attn_implementation="eager",
    )
    return models.HuggingFace(BertForMaskedLM(config))


CASES = {
    "mlp": (mlp, vectors),
    "cnn": (models.cnn, models.images),
    "gpt2": (models.gpt2, models.tokens),
    "bert": (models.bert, models.tokens),
    "eager": (eager_bert, models.tokens),
}


def both(
    model: nn.Module, call: Call, device: torch.device, optimizer: Any = "adamw"
) -> tuple[Trace, Trace]:
    static = _StaticTracer(model, call, device, None, optimizer)
    recorded = record_step(model, call, device, optimizer=optimizer)
    assert recorded.method == "recorded"
    return static.trace(repeat=False).trace, recorded.trace


def steps(trace: Trace, granularity: int) -> list[tuple[Any, ...]]:
    """Each op's name, phase, layer and bytes, as a real run and a fake one have them.

    A fake scalar is lifted by an op of its own; where gradients meet, a real run
    adds in place, and a fake one notes that it would have; a view has two names.
    """
    same = {
        "aten::add_.Tensor": "aten::add.Tensor",
        "aten::_reshape_alias": "aten::view",
    }
    timeline = Timeline(trace, "device", granularity)
    return [
        (
            same.get(trace[i].name, trace[i].name),
            trace[i].phase,
            trace[i].layer,
            timeline[i].bytes,
        )
        for i in range(len(trace))
        if trace[i].name not in ("aten::lift_fresh", "aten::detach_")
    ]


class TestAgreement:
    @pytest.mark.parametrize("name", CASES)
    def test_on_the_cpu(self, name: str) -> None:
        make, batch = CASES[name]
        model, call = make(), read_call(batch())
        static, recorded = both(model, call, torch.device("cpu"))
        assert steps(static, 1) == steps(recorded, 1)
        assert static.num_saves == recorded.num_saves

    def test_of_an_optimizer_that_holds_frozen_parameters(self) -> None:
        make, batch = CASES["mlp"]
        model, call = make(), read_call(batch())
        next(model.parameters()).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters())
        static, recorded = both(model, call, torch.device("cpu"), optimizer)
        assert steps(static, 1) == steps(recorded, 1)

    @pytest.mark.parametrize("name", ["mlp", "cnn", "eager"])
    def test_on_the_simulated_device(self, name: str, sim: torch.device) -> None:
        make, batch = CASES[name]
        model = make().to(sim)
        call = read_call([tensor.to(sim) for tensor in batch()])
        static, recorded = both(model, call, sim)
        assert steps(static, 512) == steps(recorded, 512)
        assert static.num_saves == recorded.num_saves

    @pytest.mark.parametrize("name", CASES)
    def test_of_the_bytes_that_are_counted(self, name: str) -> None:
        make, batch = CASES[name]
        model, call = make(), read_call(batch())
        static, recorded = both(model, call, torch.device("cpu"))

        def sums(trace: Trace) -> dict[tuple[str, str | None], int]:
            data = json.loads(trace.to_json())
            found: dict[tuple[str, str | None], int] = {}
            for storage in data["storages"]:
                if storage["bytes"] <= 8:  # numbers
                    continue
                layer = storage["layer"]
                key = (
                    storage["category"],
                    None if layer is None else data["layers"][layer]["name"],
                )
                total = storage["bytes"] * storage["count"]
                found[key] = found.get(key, 0) + total
            return found

        assert {
            key: size for key, size in sums(static).items() if key[0] != "transients"
        } == {
            key: size for key, size in sums(recorded).items() if key[0] != "transients"
        }

    def test_twice_the_same(self, sim: torch.device) -> None:
        for device in (torch.device("cpu"), sim):
            model = models.cnn().to(device)
            call = read_call([tensor.to(device) for tensor in models.images()])
            first = record_step(model, call, device).trace
            second = record_step(model, call, device).trace
            assert first.to_json() == second.to_json()
            assert Trace.from_json(first.to_json()) == first

    def test_of_the_step_with_a_measured_one(self, sim: torch.device) -> None:
        for device in (torch.device("cpu"), sim):
            model, batch = models.gpt2(), models.tokens()
            call = read_call([tensor.to(device) for tensor in batch])
            step = record_step(model.to(device), call, device)
            granularity = 1 if device.type == "cpu" else 512
            peak = Timeline(step.trace, "device", granularity).peak().bytes
            measured = measure_peak(model, batch, None, torch.optim.AdamW, device)
            assert abs(peak - measured) <= measured / 100


class Looks(nn.Module):
    """Blocks, and a decision that only values can make."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Residual(32, dropout) for _ in range(6)))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if y.sum() > 1e9:
            y = y.cos()
        return self.head(y).square().mean()


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


@pytest.fixture
def warnings_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("memscale"), "propagate", True)
    estimate._log_once.cache_clear()
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "memscale" and record.levelno == logging.WARNING
    ]


class TestFallback:
    def test_records_and_warns_once(self, warnings_of: Callable[[], list[str]]) -> None:
        model, x = Looks(), torch.randn(16, 32)
        estimates = [memscale.estimate(model, x) for _ in range(2)]
        assert [e.method for e in estimates] == ["recorded"] * 2
        (warning,) = warnings_of()
        assert warning.startswith("Looks is recorded for real, because values decide")
        assert estimates[0].trace == estimates[1].trace
        assert estimates[0].loss == "the model's own"
        measured = measure_peak(model, x, None, torch.optim.AdamW, "cpu")
        assert abs(estimates[0].peak_bytes - measured) <= measured / 100

    def test_a_traceable_model_gives_no_warning(
        self, warnings_of: Callable[[], list[str]]
    ) -> None:
        assert memscale.estimate(models.cnn(), models.images()).method == "static"
        assert warnings_of() == []

    def test_can_be_forbidden(self) -> None:
        config = memscale.Config(use_empirical_fallback=False)
        model, x = Looks(), torch.randn(16, 32)
        with pytest.raises(CannotTrace, match="values decide") as caught:
            memscale.estimate(model, x, config=config)
        assert isinstance(caught.value, memscale.TraceError)

    def test_can_be_asked_for(self) -> None:
        config = memscale.Config(use_static_profiling=False)
        e = memscale.estimate(models.cnn(), models.images(), config=config)
        assert e.method == "recorded"
        assert e.peak_bytes > 0

    def test_one_way_must_be_allowed(self) -> None:
        config = memscale.Config(
            use_static_profiling=False, use_empirical_fallback=False
        )
        with pytest.raises(memscale.InputError, match="must be on"):
            memscale.estimate(models.cnn(), models.images(), config=config)

    def test_needs_the_model_where_it_is_asked_for(self, sim: torch.device) -> None:
        x = torch.randn(16, 32)
        with torch.device("meta"):
            on_meta = Looks()
        with pytest.raises(memscale.TraceError, match="is on meta, not on cpu"):
            memscale.estimate(on_meta, x, device="cpu")
        with pytest.raises(memscale.TraceError, match="is on cpu, not on sim"):
            memscale.estimate(Looks(), x, device="sim")

    def test_other_data_dependent_code(self) -> None:
        class Selects(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.layer(x)
                return y[y > 0].sum() + float(y.detach().max())

        e = memscale.estimate(Selects(), torch.randn(4, 8))
        assert e.method == "recorded"

    def test_an_evaluating_model_is_recorded_in_training(self) -> None:
        model = Looks().eval()
        trace = memscale.estimate(model, torch.randn(16, 32), None).trace
        assert any(trace[i].random for i in range(len(trace)))
        assert not any(module.training for module in model.modules())


class TestOutOfMemory:
    def test_blocks_are_checkpointed_and_the_trace_is_the_same(
        self, sim_of: Callable[[int | str], torch.device]
    ) -> None:
        torch.manual_seed(0)
        model = Looks(dropout=0.1)
        x = torch.randn(512, 32)

        def peak_on(memory: int | str) -> tuple[int, Trace]:
            device = sim_of(memory)
            on_device = model.to(device)
            torch.accelerator.reset_peak_memory_stats()
            try:
                call = read_call(x.to(device))
                trace = record_step(on_device, call, device).trace
                took = torch.accelerator.max_memory_allocated()
            finally:
                model.to("cpu")
            return took, trace

        took, large = peak_on("1GiB")
        enough = took * 2 // 3
        less, small = peak_on(enough)
        assert less <= enough < took
        peaks = [Timeline(t, "device", 512).peak() for t in (large, small)]
        assert peaks[0].bytes == peaks[1].bytes > enough
        assert peaks[0].by_category == peaks[1].by_category
        assert steps(large, 512) == steps(small, 512)
        assert small.num_saves == large.num_saves

    def test_too_little_is_an_error(
        self, sim_of: Callable[[int | str], torch.device]
    ) -> None:
        device = sim_of("1MiB")
        model = Looks().to(device)
        x = torch.randn(512, 32, device=device)
        before = [p.detach().cpu().clone() for p in model.parameters()]
        with pytest.raises(torch.OutOfMemoryError):
            record_step(model, read_call(x), device)
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.cpu(), value)
            assert parameter.grad is None
        assert not any("forward" in vars(module) for module in model.modules())


class TestQuantisedWeights:
    """What their kernels take shows only when they run: so they are recorded."""

    def adapted(self) -> nn.Module:
        class Adapted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                codes = torch.zeros(64, 64, dtype=torch.int8)
                self.codes = nn.Parameter(codes, requires_grad=False)
                self.adapter = nn.Linear(64, 64)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x @ self.codes.float() + self.adapter(x)).square().mean()

        return Adapted()

    def test_integers(self) -> None:
        estimate = memscale.estimate(self.adapted(), torch.randn(8, 64))
        assert estimate.method == "recorded"
        adapter = 64 * 65 * 4
        assert estimate.breakdown["parameters"] == 64 * 64 + adapter

    def test_a_subclass_counts_what_is_inside(self) -> None:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4))
        weight = torch.randn(64, 64)
        model[0].weight = nn.Parameter(
            TwoTensor(weight, weight.clone()), requires_grad=False
        )
        estimate = memscale.estimate(model, torch.randn(8, 64))
        assert estimate.method == "recorded"
        assert estimate.breakdown["parameters"] == (2 * 64 * 64 + 65 * 4) * 4

    def test_not_where_they_are(self) -> None:
        with pytest.raises(memscale.TraceError, match="codes is a Parameter of torch"):
            memscale.estimate(self.adapted().to("meta"), torch.randn(8, 64))
