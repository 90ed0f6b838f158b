"""Some of the zoo, of many kinds; ``make test-zoo`` runs them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zoo import budgets
from zoo.architectures import architectures
from zoo.budgets import Budgeted, Shown
from zoo.check import Outcome, check
from zoo.compare import Run, first_difference, train
from zoo.goals import asides, goals
from zoo.run import Results, in_order, summary
from zoo.shrink import LAYERS, shrunk
from zoo.torch_models import MODELS

# sim: loaded before the first backward, where autograd's engine counts devices.
pytestmark = pytest.mark.usefixtures("sim", "one_thread")

SAMPLE = [
    "bert",  # masked words
    "deberta-v2",
    "gpt2",  # next word
    "qwen3",
    "mixtral",  # experts
    "mamba2",  # state space
    "recurrent_gemma",
    "t5",  # encoder and decoder
    "whisper",  # speech
    "wav2vec2",
    "vit",  # images
    "swin",
    "convnext",
    "detr",  # detection
    "clip",  # text and images
]


# In plain torch, with all that is shown of them.
TORCH_SAMPLE = [
    "torch:mobilenet",  # depthwise convolutions, rows dropped at random
    "torch:unet_2d",  # skips over many layers, transposed convolutions
    "torch:diffusion_unet",
    "torch:wavenet",
    "torch:conformer",  # recorded: values decide what its loss does
    "torch:mamba",  # a loop
    "torch:gat",  # scatter
    "torch:nerf",
    "torch:capsules",  # routing in a loop
    "torch:seq_to_seq",  # a recurrent layer of torch's, then cells in a loop
]


@pytest.mark.parametrize("kind", SAMPLE)
def test_trains_as_the_plain_model_does(kind: str) -> None:
    outcome = check(kind, ("wrap", "block"))
    assert outcome.status == "passed", str(outcome)
    assert " 0 ops replayed" not in outcome.text
    assert " 0 KiB dropped" not in outcome.text


@pytest.mark.parametrize("kind", TORCH_SAMPLE)
def test_plans_of_plain_torch_are_followed(kind: str) -> None:
    """Equal, planned, like its plan, within both budgets, on both devices."""
    outcome = check(kind, ("wrap", "cpu", "sim"))
    assert outcome.status == "passed", str(outcome)
    for shown in outcome.shown.values():
        assert shown.trouble is None, str(outcome)
        assert shown.planned in ("traced", "recorded"), str(outcome)
        assert shown.unlike == 0, str(outcome)
        assert set(shown.budgets) == {"smallest", "middle"}, str(outcome)
        assert all(each.is_kept for each in shown.budgets.values()), str(outcome)
        assert -0.01 <= shown.error <= 0.03, str(outcome)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_moe", "deepseek_v3", "olmoe"])
def test_experts_are_not_held_between_steps(kind: str) -> None:
    """Which experts run differs from step to step; what is held does not."""
    outcome = check(kind, ("wrap", "block"))
    assert outcome.status == "passed", str(outcome)


def test_enough_architectures() -> None:
    assert len(SAMPLE) == 15
    assert len(architectures()) >= 500
    assert len(MODELS) >= 40
    assert in_order() == in_order()
    assert sorted(in_order()) == sorted([*MODELS, *architectures()])
    assert not set(MODELS) & set(architectures())


class Layers(nn.Module):
    """Some layers; its fourth call holds another ``waste`` bytes."""

    def __init__(self, waste: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.calls = 0
        self.waste = waste

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        held = torch.empty(self.waste if self.calls == 4 else 0, device=x.device)
        return self.layers(x).sin().exp().square().mean() + 0 * held.sum()


@pytest.mark.parametrize("device", budgets.DEVICES)
def test_a_budget_that_is_exceeded_is_seen(device: str) -> None:
    batch = {"x": torch.randn(512, 64)}
    assert all(
        b.is_kept for b in budgets.show(Layers(), batch, device).budgets.values()
    )
    shown = budgets.show(Layers(1 << 22), batch, device)
    assert shown.budgets
    assert not any(b.is_kept for b in shown.budgets.values())
    assert "EXCEEDED" in str(shown)
    assert not shown.steady
    # The prediction is that of its other calls, of which the second is one.
    assert abs(shown.error) < 0.001


def test_measured_bytes_are_absolute() -> None:
    """Parameters, buffers, the batch and the optimizer's state count."""

    def peak(parameters: int, buffers: int) -> int:
        model = Layers()
        model.more = nn.Parameter(torch.zeros(parameters))
        model.more.requires_grad_(False)
        model.register_buffer("table", torch.zeros(buffers))
        training = budgets._Training(model, {"x": torch.randn(512, 64)}, "cpu")
        training.run(2)
        return training.peaks[1]

    least = peak(0, 0)
    assert peak(1000, 0) - least == 4 * 1000
    assert peak(0, 3000) - least == 4 * 3000
    trained = 4 * (64 * 64 + 64)
    assert least >= 4 * 512 * 64 + trained * 4 * 4  # with gradients and two moments


def test_another_result_under_a_budget_is_seen() -> None:
    class Wrong(Layers):
        def forward(self, x: Tensor) -> Tensor:
            wrapped = getattr(self, "_memscale_executor", None) is not None
            return super().forward(x) * (2 if wrapped else 1)

    shown = budgets.show(Wrong(), {"x": torch.randn(512, 64)}, "cpu")
    assert shown.difference is not None
    assert "DIFFERS" in str(shown)


def _outcome(kind: str, error: float, over: float, unlike: int = 0) -> Outcome:
    run = Budgeted(1000, 1000, [900, int(1000 * (1 + over))], unlike)
    shown = Shown(
        "traced", predicted=round(10**6 * (1 + error)), measured=10**6, budgets={}
    )
    shown.budgets = {"smallest": run, "middle": Budgeted(1000, 1000, [1, 1000])}
    return Outcome(kind, "passed", "equal", {"cpu": shown})


def test_goals_are_met_and_missed() -> None:
    fine = [_outcome("a", 0.00005, 0.0), _outcome("b", -0.00005, -0.1)]
    assert len(goals(fine)) == 7
    assert all(goal.is_met for goal in goals(fine))
    for bad, missed in (
        (_outcome("c", 0.0, 0.01), {"cpu, smallest budget"}),
        (_outcome("c", 0.0, 0.0, unlike=1), {"cpu, unlike calls"}),
        (_outcome("c", 0.04, 0.0), {"cpu, estimate of 3, worst"}),
        (_outcome("c", -0.02, 0.0), {"cpu, estimate of 3, most under"}),
    ):
        judged = goals([*fine, bad])
        assert {goal.name for goal in judged if not goal.is_met} == missed
        assert any(each.startswith("c: ") for g in judged for each in g.missed_by)
    often = goals([_outcome(kind, 0.001, 0.0) for kind in "abc"])
    assert [g.name for g in often if not g.is_met] == [
        "cpu, estimate of 3, median |error|"
    ]
    unplanned = _outcome("c", 0.0, 0.0)
    unplanned.shown["cpu"].planned = "none"
    assert not goals([*fine, unplanned])[0].is_met


def test_a_goal_that_is_missed_fails_the_run() -> None:
    missed = [_outcome("c", 0.0, 0.01)]
    assert summary(missed, at_least=0, seconds=1.0) == 1
    assert summary(missed, at_least=0, seconds=1.0, checks=False) == 0
    assert summary([_outcome("a", 0.0, 0.0)], at_least=0, seconds=1.0) == 0


def test_random_depth_is_not_among_the_errors() -> None:
    deep = _outcome("deep", -0.5, 0.0)
    deep = Outcome("deep", "passed", "", deep.shown, has_random_depth=True)
    outcomes = [_outcome("a", 0.0, 0.0), deep]
    assert all(goal.is_met for goal in goals(outcomes))
    assert any("random depth" in text and "deep" in text for text in asides(outcomes))


def test_a_config_is_shrunk_to_its_sub_configs() -> None:
    config = shrunk("llava", {})
    assert config.text_config.num_hidden_layers == LAYERS
    assert config.vision_config.num_hidden_layers == LAYERS
    assert config.text_config.attention_dropout == 0.1
    assert config.image_token_id < config.text_config.vocab_size


def test_a_difference_is_seen() -> None:
    """NaN equals NaN, and a zero is not another one."""
    a, b = torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), -0.0])
    assert first_difference(Run({"x": a}), Run({"x": a.clone()})) is None
    assert first_difference(Run({"x": a}), Run({"x": b})) is not None
    model = torch.nn.Linear(2, 2)
    loss = "step 0: loss"
    assert train(model, {"input": torch.ones(1, 2)}, steps=1).recorded[loss] is not None


def test_bytes_held_between_steps_are_seen() -> None:
    class Hoards(torch.nn.Linear):
        def __init__(self, bytes_each: int) -> None:
            super().__init__(2, 2)
            self.bytes_each = bytes_each
            self.kept: list[torch.Tensor] = []

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.kept.append(torch.empty(self.bytes_each, dtype=torch.uint8))
            return super().forward(input)

    batch = {"input": torch.ones(1, 2)}
    few, many = (train(Hoards(size), batch).held for size in (64, 4096))
    assert many - few == 3 * (4096 - 64)


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """What failed is tried again, and its last outcome counts."""
    path = tmp_path / "zoo.jsonl"
    stopped = Results(path)
    stopped.add(Outcome("bert", "passed", "equal"))
    stopped.add(Outcome("gpt2", "failed", "its process died"))
    stopped.add(Outcome("sam", "skipped", "no batch of ours fits"))
    again = Results(path)
    assert again.outcomes == stopped.outcomes
    assert [again.is_done(kind) for kind in ("bert", "gpt2", "sam", "t5")] == [
        True,
        False,
        True,
        False,
    ]
    again.add(_outcome("gpt2", 0.01, 0.02, unlike=3))
    assert Results(path).outcomes["gpt2"] == _outcome("gpt2", 0.01, 0.02, unlike=3)


def test_results_of_an_earlier_zoo_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "zoo.jsonl"
    path.write_text('{"kind": "bert", "status": "passed", "text": "equal"}\n')
    with pytest.raises(SystemExit, match=r"earlier zoo.*name another file"):
        Results(path)
