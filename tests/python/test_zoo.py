"""Fifteen of the zoo, of many kinds; ``make test-zoo`` runs them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zoo.architectures import architectures
from zoo.check import Outcome, check
from zoo.compare import Run, first_difference, train
from zoo.run import Results
from zoo.shrink import LAYERS, shrunk

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


@pytest.mark.parametrize("kind", SAMPLE)
def test_trains_as_the_plain_model_does(kind: str) -> None:
    outcome = check(kind)
    assert outcome.status == "passed", str(outcome)
    assert " 0 ops replayed" not in outcome.text
    assert " 0 KiB dropped" not in outcome.text


@pytest.mark.full
@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_moe", "deepseek_v3", "olmoe"])
def test_experts_are_not_held_between_steps(kind: str) -> None:
    """Which experts run differs from step to step; what is held does not."""
    outcome = check(kind)
    assert outcome.status == "passed", str(outcome)


def test_enough_architectures() -> None:
    assert len(SAMPLE) == 15
    assert len(architectures()) >= 500


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
    again.add(Outcome("gpt2", "passed", "equal"))
    assert Results(path).outcomes["gpt2"].status == "passed"
