"""The memory of a step under replay, predicted and measured."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import memscale
from memscale import replay
from memscale._C import ReplayedStep, TapeRules, Timeline, TraceError, replayed_step
from memscale.benchmarks.measure import forward, loss_of
from memscale.benchmarks.models import BENCHMARK_MODELS, LossFn
from memscale.memory import track

# Small, but with tensors above the size that replay keeps.
_GPT2 = {
    "vocab_size": 512,
    "n_embd": 128,
    "n_layer": 6,  # so many that the middle ones are copied in the trace
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_BERT = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
_T5 = {
    "vocab_size": 512,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
}


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))
                for _ in range(6)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class _Gelu(torch.autograd.Function):
    """With temporaries that are gone when it is through, and a save of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        for _ in range(4):
            x = x + 0.1
        return torch.nn.functional.gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x.sigmoid()


class _WithFunctions(nn.Module):
    """Layers of custom Functions, as fused kernels come."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)])
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in self.layers:
            h = _Gelu.apply(up(norm(x)).mul(1.1))
            x = x + nn.functional.dropout(down(h).tanh(), 0.1)
        return x


class _Recycled(nn.Module):
    """Only the last of its passes has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = _Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            with torch.set_grad_enabled(i == 3):
                x = x + self.trunk(x)
        return x


_OWN = {"mlp": _Mlp, "functions": _WithFunctions, "recycled": _Recycled}


@dataclass(frozen=True)
class Case:
    model: nn.Module
    batch: Any
    loss_fn: LossFn | None


def _case(name: str) -> Case:
    torch.manual_seed(0)
    if name in _OWN:
        batch = (torch.randn(256, 128),)
        return Case(_OWN[name](), batch, lambda out: out.square().mean())
    model, rows, size, overrides = {
        "gpt2": ("gpt2", 2, 64, _GPT2),
        "gpt2-eager": ("gpt2", 2, 64, {**_GPT2, "attn_implementation": "eager"}),
        "bert": ("bert-base", 2, 64, _BERT),
        "t5": ("t5-small", 2, 64, _T5),
        "resnet18": ("resnet18", 2, 64, {}),
        "unet": ("unet", 1, 64, {"width": 16, "depth": 2, "dropout": 0.1}),
        "lstm": ("lstm", 4, 32, {"vocabulary": 512, "width": 128}),
    }[name]
    entry = BENCHMARK_MODELS[model]
    return Case(
        entry.build(**overrides), entry.sample(rows, size, "cpu"), entry.loss_fn
    )


_FEW_BLOCKS = 16 * 512

NAMES = ("gpt2", "gpt2-eager", "bert", "t5", "resnet18", "unet", "lstm", *_OWN)


def _rules(names: list[str], policy: str) -> list[TapeRules]:
    return [TapeRules(policy, None, replay.DEFAULT_MIN_BYTES) for _ in names]


def _timeline(step: ReplayedStep, device: str) -> Timeline:
    return Timeline(step.trace, "device", 1 if device == "cpu" else 512)


def _predict(
    case: Case, device: str, policy: str | None
) -> tuple[ReplayedStep, int, int]:
    """The step, its peak, and the bytes that backward finds."""
    estimate = memscale.estimate(
        case.model, case.batch, "sgd", loss_fn=case.loss_fn, device=device
    )
    plain = estimate.trace
    step = replayed_step(plain, _rules(plain.layers, policy or "keep"), device == "cpu")
    timeline = _timeline(step, device)
    peak = timeline.peak()
    assert peak is not None
    first = next(i for i in range(len(step.trace)) if step.trace[i].phase == "backward")
    # It makes the loss's gradient, one number.
    assert step.trace[first].name == "aten::ones_like"
    return step, peak.bytes, timeline[first].bytes - (4 if device == "cpu" else 512)


def _measure(
    case: Case, device: str, policy: str | None
) -> tuple[int, int, replay.Stats | None]:
    gc.collect()
    with track(device) as run:
        model = copy.deepcopy(case.model).to(device)
        for module in model.modules():  # deepcopy's buffers are not counted
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.clone()
        batch = tree_map(
            lambda x: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x,
            case.batch,
        )
        optimizer = torch.optim.SGD(model.parameters())
        handle = None if policy is None else replay.attach(model, policy)
        # The first step makes what is made once.
        for _ in range(2):
            if handle is not None:
                handle.reset_stats()
            with track(device) as step:
                loss = loss_of(forward(model, batch), case.loss_fn)
                alive = step.current - run.before
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                del loss
        stats = None
        if handle is not None:
            stats = handle.stats()
            handle.detach()
    return step.peak - run.before, alive, stats


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", NAMES)
class TestPrediction:
    @pytest.mark.parametrize("policy", ["cheap", "block"])
    def test_is_what_is_measured(
        self, name: str, policy: str, device: str, sim: torch.device
    ) -> None:
        case = _case(name)
        step, peak, alive = _predict(case, device, policy)
        measured_peak, measured_alive, stats = _measure(case, device, policy)
        assert stats is not None
        # Scalars that a plain step's estimate misses as well: a few blocks.
        assert abs(alive - measured_alive) <= _FEW_BLOCKS
        assert -0.01 <= peak / measured_peak - 1 <= 0.03
        assert step.num_replayed == stats.ops_replayed > 0

    def test_with_keep_is_the_plain_step(
        self, name: str, device: str, sim: torch.device
    ) -> None:
        case = _case(name)
        plain = memscale.estimate(
            case.model, case.batch, "sgd", loss_fn=case.loss_fn, device=device
        ).trace
        step = replayed_step(plain, _rules(plain.layers, "keep"), device == "cpu")
        assert step.trace == plain


class TestReplayedStep:
    def test_a_layers_figures_sum_up(self, sim: torch.device) -> None:
        step, _, _ = _predict(_case("gpt2"), "sim", "block")
        assert sum(layer.ops for layer in step.layers) == step.num_replayed
        assert sum(layer.flops for layer in step.layers) > 0
        blocks = [
            figures
            for name, figures in zip(step.trace.layers, step.layers, strict=True)
            if name.startswith("transformer.h.")
        ]
        assert len(blocks) == 6
        # Equal layers cost the same, whether traced or copied; the last one's
        # result is another layer's input.
        assert len({(b.ops, b.flops, b.moved, b.held_plain) for b in blocks}) == 1
        assert all(b.held < b.held_plain and b.moved > 0 for b in blocks)

    def test_what_is_made_again_has_a_category_of_its_own(
        self, sim: torch.device
    ) -> None:
        step, _, _ = _predict(_case("gpt2"), "sim", "block")
        timeline = _timeline(step, "sim")
        peaks = [
            max(timeline[i].by_category["recompute"] for i in phase)
            for phase in (
                [i for i in range(len(step.trace)) if step.trace[i].phase == name]
                for name in ("forward", "backward", "optimizer")
            )
        ]
        assert peaks[0] == peaks[2] == 0
        assert peaks[1] > 0

    def test_a_keep_set_may_stand_for_a_policy(self) -> None:
        plain = memscale.estimate(_Mlp(), torch.randn(256, 128), "sgd").trace
        of_layer = [
            op
            for op in (plain[i] for i in range(len(plain)))
            if op.phase == "forward" and op.layer == "layers.0"
        ]
        names = [op.name for op in of_layer]
        rules = _rules(plain.layers, "keep")
        rules[plain.layers.index("layers.0")] = TapeRules(
            "keep", replay.KeepSet(names, []), 0
        )
        step = replayed_step(plain, rules, True)
        touched = [
            name
            for name, figures in zip(plain.layers, step.layers, strict=True)
            if figures.ops > 0
        ]
        assert touched == ["layers.0"]

    def test_refuses_another_number_of_layers(self) -> None:
        plain = memscale.estimate(_Mlp(), torch.randn(4, 128), "sgd").trace
        with pytest.raises(TraceError, match="rules must be given for each of"):
            replayed_step(plain, [], True)
