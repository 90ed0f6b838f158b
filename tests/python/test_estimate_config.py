"""``estimate(config=...)``: the step under the plan that the config asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
)

import memscale
from memscale import Config, Plan, PlanError, cli
from plan_cases import Case, assert_same, case, golden, run_on

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

CONFIGS = {
    "balanced": Config(force_optimize=True),
    "conservative": Config(mode="conservative", force_optimize=True),
    "aggressive": Config(mode="aggressive", force_optimize=True),
    "8bit": Config(use_8bit_optimizer=True, force_optimize=True),
    "tiny": Config(),
    "off": Config(enable_checkpointing=False),
    "recorded": Config(use_static_profiling=False, force_optimize=True),
}


def _gpt2() -> Case:
    return golden("gpt2")


def _peaks(one: Case, config: Config, device: str) -> list[int]:
    """Plain and planned, by ``estimate`` and by ``plan``."""
    arguments = (one.model, one.batch, "adamw", config, one.loss_fn)
    made = memscale.estimate(*arguments, device=device)
    plan = memscale.plan(*arguments, device=device)
    assert made.plan == plan
    return [
        *(made.plain_peak_bytes, made.peak_bytes),
        *(plan.plain_peak_bytes, plan.peak_bytes),
    ]


# A real step is recorded where the model is: on the CPU.
@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "cpu") for name in CONFIGS]
    + [(name, "RTX 3090") for name in CONFIGS if name != "recorded"],
)
def test_peaks_are_those_of_the_plan(name: str, device: str) -> None:
    plain, peak, plan_plain, plan_peak = _peaks(_gpt2(), CONFIGS[name], device)
    assert (plain, peak) == (plan_plain, plan_peak)
    if name not in ("tiny", "off", "recorded"):
        assert peak < plain


def test_without_a_config_it_is_the_plain_step() -> None:
    one = _gpt2()
    made = memscale.estimate(one.model, one.batch, device="sim")
    assert made.plan is None
    assert made.peak_bytes == made.plain_peak_bytes
    assert made.to_dict()["plan"] is None
    assert "under the plan" not in str(made)
    assert made.breakdown["recompute"] == 0


_SMALL = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _cached(name: str) -> Case:
    """A model that caches keys and values in training, as it is configured."""
    torch.manual_seed(0)
    if name == "bart":
        model = BartForConditionalGeneration(
            BartConfig(
                **_SMALL,
                d_model=64,
                encoder_layers=2,
                decoder_layers=3,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=128,
                decoder_ffn_dim=128,
            )
        )
    elif name == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                **_SMALL,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=6,
                num_attention_heads=4,
            )
        )
    else:
        return golden(name)
    ids = torch.zeros(2, 64, dtype=torch.long)
    return Case(model, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("device", ["cpu", "RTX 3090"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
def test_there_is_one_plain_peak(name: str, device: str) -> None:
    """By ``estimate`` with and without a config, and by ``plan``; asked for or not."""
    one = _cached(name)
    for use_cache in (None, True):
        batch = dict(one.batch)
        if use_cache is not None:
            batch["use_cache"] = use_cache
        plain = memscale.estimate(one.model, batch, device=device)
        planned = memscale.estimate(one.model, batch, config=Config(), device=device)
        plan = memscale.plan(one.model, batch, device=device)
        found = {
            plain.peak_bytes,
            plain.plain_peak_bytes,
            planned.plain_peak_bytes,
            plan.plain_peak_bytes,
        }
        assert len(found) == 1, (use_cache, found)


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_it_is_measured_so(name: str, sim: torch.device) -> None:
    one = case(name)
    config = Config(mode="aggressive", force_optimize=True, use_8bit_optimizer=False)
    made = memscale.estimate(
        one.model, one.batch, "sgd", config, one.loss_fn, device="sim"
    )
    plain = run_on(sim, one)
    ours = run_on(sim, one, lambda model: memscale.wrap(model, config))
    assert_same(plain, ours)
    assert -0.01 <= made.plain_peak_bytes / plain.peak - 1 <= 0.03
    assert -0.01 <= made.peak_bytes / ours.peak - 1 <= 0.03
    assert made.peak_bytes < made.plain_peak_bytes


def test_everything_is_of_the_planned_step() -> None:
    one = _gpt2()
    config = Config(mode="aggressive", force_optimize=True)
    plain = memscale.estimate(one.model, one.batch, device="cpu")
    made = memscale.estimate(one.model, one.batch, config=config, device="cpu")
    assert made.plan is not None
    assert made.plan.optimizer_bits == 8
    assert len(made.trace) > 0
    assert made.timeline.peak().bytes == made.peak_bytes
    assert sum(made.breakdown.values()) == made.peak_bytes
    assert sum(share.bytes for share in made.layers) == made.peak_bytes
    assert max(made.phases.values()) == made.peak_bytes
    for phase, size in made.phases.items():
        assert size < plain.phases[phase]
    assert made.fits("RTX 3090").needed < plain.fits("RTX 3090").needed
    # The optimizer's state, which the plan holds in 8 bits, is in the table so.
    assert made.breakdown["optimizer_state"] < plain.breakdown["optimizer_state"] / 3


def test_text_and_json() -> None:
    one = _gpt2()
    config = Config(force_optimize=True)
    made = memscale.estimate(one.model, one.batch, config=config, device="sim")
    text = str(made)
    assert f"({made.peak_bytes:,} bytes) under the plan\n" in text
    assert f"instead of {memscale.config.format_bytes(made.plain_peak_bytes)}" in text
    assert made.plan is not None
    recomputing = sum(layer.recomputes for layer in made.plan.layers)
    assert (
        f"plan       mode balanced: {recomputing} of {len(made.plan.layers)} layers "
        f"recompute, {made.plan.slowdown:.0%} slower"
    ) in text
    assert all(len(line) <= 88 for line in text.splitlines())
    found = json.loads(made.to_json())
    assert found["plain_peak_bytes"] == made.plain_peak_bytes > found["peak_bytes"]
    assert Plan.from_json(json.dumps(found["plan"])) == made.plan


def test_a_budget() -> None:
    one = _gpt2()
    for fields, error in (({"budget": "1KiB"}, True), ({"budget": "40MiB"}, False)):
        arguments: tuple[Any, ...] = (one.model, one.batch, "adamw", Config(**fields))
        if error:
            with pytest.raises(PlanError) as by_estimate:
                memscale.estimate(*arguments, device="sim")
            with pytest.raises(PlanError) as by_plan:
                memscale.plan(*arguments, device="sim")
            assert str(by_estimate.value) == str(by_plan.value)
            assert "budget must be at least" in str(by_plan.value)
            continue
        made = memscale.estimate(*arguments, device="sim")
        assert made.peak_bytes <= 40 << 20 < made.plain_peak_bytes
        assert "budget 40.00 MiB: " in str(made)


def test_a_plan_that_is_given() -> None:
    """It is followed as it is; bytes are of this batch, not of the plan's."""
    one = _gpt2()
    plan = memscale.plan(
        one.model, one.batch, config=Config(budget="40MiB"), device="sim"
    )
    made = memscale.estimate(
        one.model, one.batch, config=Config(plan=plan), device="sim"
    )
    assert made.plan == plan
    assert made.peak_bytes == plan.peak_bytes
    half = {name: tensor[:2] for name, tensor in one.batch.items()}
    smaller = memscale.estimate(one.model, half, config=Config(plan=plan), device="sim")
    plain = memscale.estimate(one.model, half, device="sim")
    assert smaller.plain_peak_bytes == plain.peak_bytes
    assert smaller.peak_bytes < plan.peak_bytes
    other = golden("bert-base")
    with pytest.raises(PlanError, match="layer"):
        memscale.estimate(other.model, other.batch, config=Config(plan=plan))
    with pytest.raises(memscale.ConfigError, match="enable_checkpointing"):
        memscale.estimate(
            one.model, one.batch, config=Config(plan=plan, enable_checkpointing=False)
        )


def test_no_config() -> None:
    one = _gpt2()
    for function in (memscale.estimate, memscale.plan, memscale.pareto):
        with pytest.raises(TypeError, match="config must be a Config, got dict"):
            function(one.model, one.batch, config={"budget": 1})  # type: ignore[operator]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    subject = [
        *("gpt2", "--batch", "4", "--seq", "128", "--device", "RTX 3090"),
        *("--set", "n_layer=4", "--set", "n_embd=128", "--set", "n_head=4"),
    ]

    def printed(*arguments: str) -> Any:
        assert cli.main([*arguments, *subject, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    plain = printed("estimate")
    assert plain["plan"] is None
    smallest = printed("estimate", "--mode", "aggressive")["peak_bytes"]
    middle = str((smallest + plain["peak_bytes"]) // 2)
    for wishes in (["--mode", "aggressive"], ["--budget", middle]):
        made = printed("estimate", *wishes)
        assert made["plan"] == printed("plan", *wishes)
        plan = Plan.from_json(json.dumps(made["plan"]))
        assert made["peak_bytes"] == plan.peak_bytes < plain["peak_bytes"]
        assert made["plain_peak_bytes"] == plan.plain_peak_bytes
        assert plan.plain_peak_bytes == plain["peak_bytes"]
    assert cli.main(["estimate", *subject, "--budget", "1MiB"]) == 1
    assert "budget must be at least" in capsys.readouterr().err
