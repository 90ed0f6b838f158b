"""Config as Python users meet it; the rules themselves are tested in C++."""

from __future__ import annotations

import argparse
import copy
import enum
import fractions
import inspect
import pathlib
import pickle
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import memscale
from memscale import _C, config
from memscale.config import AsyncOffloadConfig, Config, OptimizationMode

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_defaults() -> None:
    c = Config()
    assert c.mode is OptimizationMode.BALANCED
    assert c.budget is None
    assert c.target_gpu_utilization == 0.85
    assert (c.enable_checkpointing, c.enable_offloading) == (True, True)
    assert (c.enable_tiling, c.use_mixed_precision) == (False, False)
    assert c.use_8bit_optimizer is False
    assert c.warmup_steps == 2
    assert c.async_config is None
    assert repr(c) == "Config(mode='balanced')"


def test_keywords_of_every_kind(tmp_path: pathlib.Path) -> None:
    c = Config(
        mode="aggressive",
        budget="6GiB",
        target_gpu_utilization=1,
        max_cpu_offload_gb=fractions.Fraction(1, 2),  # type: ignore[arg-type]
        log_file=tmp_path / "run.log",
        observability_port=9100,
        async_config=AsyncOffloadConfig(pinned_pool_bytes="1GiB"),
    )
    assert c.mode is OptimizationMode.AGGRESSIVE
    assert c.budget == 6 << 30
    assert isinstance(c.target_gpu_utilization, float)
    assert c.max_cpu_offload_gb == 0.5
    assert c.log_file == str(tmp_path / "run.log")
    assert c.async_config is not None
    assert c.async_config.pinned_pool_bytes == 1 << 30
    assert Config(mode=OptimizationMode.CONSERVATIVE).mode.value == "conservative"


def test_tensors_pass_for_numbers() -> None:
    c = Config.from_dict(
        {"warmup_steps": torch.tensor(3), "target_gpu_utilization": torch.tensor(0.5)}
    )
    assert (c.warmup_steps, c.target_gpu_utilization) == (3, 0.5)


def test_optimization_mode_is_an_enum() -> None:
    assert issubclass(OptimizationMode, enum.Enum)
    assert [m.name for m in OptimizationMode] == [
        "CONSERVATIVE",
        "BALANCED",
        "AGGRESSIVE",
    ]
    assert OptimizationMode("balanced") is OptimizationMode.BALANCED
    assert pickle.loads(pickle.dumps(OptimizationMode.BALANCED)) is (
        OptimizationMode.BALANCED
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"target_gpu_utilization": 1.5},
            "target_gpu_utilization must be in (0, 1], got 1.5",
        ),
        ({"warmup_steps": True}, "warmup_steps must be an integer >= 0, got True"),
        ({"warmup_steps": 2.0}, "warmup_steps must be an integer >= 0, got 2.0"),
        ({"warmup_steps": -1}, "warmup_steps must be >= 0, got -1"),
        ({"enable_tiling": [1]}, "enable_tiling must be True or False, got [1]"),
        (
            {"log_file": b"x"},
            "log_file must be None or a text that is not empty, got b'x'",
        ),
        (
            {"mode": "fast"},
            "mode must be one of conservative, balanced, aggressive, got 'fast'",
        ),
        (
            {"budget": 10**30},
            "budget must be None or a size > 0, in bytes or like '6GiB', got 1e+30",
        ),
        (
            {"budget": 10**400},
            "budget must be None or a size > 0, in bytes or like '6GiB', got inf",
        ),
        (
            {"max_cpu_offload_gb": float("nan")},
            "max_cpu_offload_gb must be None or a number >= 0, got nan",
        ),
        ({"async_config": {"prefetch_depth": 0}}, "prefetch_depth must be >= 1, got 0"),
        ({"buget": 1}, "unknown Config field 'buget'; did you mean 'budget'?"),
    ],
)
def test_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(_C.ConfigError) as caught:
        Config(**fields)
    assert str(caught.value) == message
    # The same text, and no change, when the field is assigned.
    c = Config()
    ((name, value),) = fields.items()
    with pytest.raises(_C.ConfigError) as caught:
        setattr(c, name, value)
    assert str(caught.value) == message
    assert c == Config()


def test_exception_tree() -> None:
    assert issubclass(_C.Error, RuntimeError)
    for wrong_value in (_C.ConfigError, _C.ParseError):
        assert issubclass(wrong_value, _C.Error)
        assert issubclass(wrong_value, ValueError)
    for other in (_C.HardwareError, _C.PlanError, _C.InternalError):
        assert issubclass(other, _C.Error)
        assert not issubclass(other, ValueError)
    assert _C.ConfigError.__module__ == "memscale._C"


def test_keyword_only() -> None:
    with pytest.raises(TypeError):
        Config("aggressive")  # type: ignore[arg-type,call-arg]


def test_assignment_and_attributes() -> None:
    c = Config()
    c.budget = "1.5 GiB"
    assert c.budget == 1610612736
    assert c.is_set("budget")
    c.budget = None
    assert c.budget is None
    assert "budget" in dir(c)
    with pytest.raises(AttributeError):
        c.buget  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError):
        del c.budget


def test_nested_config_is_the_configs_own() -> None:
    c = Config(async_config={"debug": True})
    assert c.async_config is not None
    c.async_config.prefetch_depth = 7
    assert repr(c) == (
        "Config(mode='balanced', "
        "async_config=AsyncOffloadConfig(prefetch_depth=7, debug=True))"
    )
    # It outlives its place in the config, and copies are apart.
    held, twin = c.async_config, copy.copy(c)
    c.async_config = None
    held.prefetch_depth = 9
    assert held.debug is True
    assert twin.async_config is not None
    assert twin.async_config.prefetch_depth == 7


def test_the_modes_decide_unless_the_field_is_set() -> None:
    assert Config(mode="aggressive").resolve().enable_tiling is True
    c = Config(mode="aggressive", enable_tiling=False)
    assert c.resolve().enable_tiling is False
    assert c.resolve().use_mixed_precision is True
    assert c.resolve().slowdown_limit is None
    assert Config(mode="conservative").resolve().enable_offloading is False
    assert Config(mode="conservative").resolve().slowdown_limit == 0.05
    assert Config(budget="1GiB", max_cpu_offload_gb=2).resolve().budget == 1 << 30
    assert Config(max_cpu_offload_gb=2).resolve().host_limit == 2 * 10**9


def test_equality_and_hash() -> None:
    assert Config() == Config(warmup_steps=2)
    assert Config() != Config(warmup_steps=3)
    assert Config() != Config(enable_tiling=False)  # it would override a mode
    assert Config() != object()
    with pytest.raises(TypeError, match="unhashable"):
        hash(Config())


EXAMPLES = [
    Config(),
    Config(mode="aggressive", enable_tiling=False, budget="6GiB", log_file="it's"),
    Config(async_config={"pinned_pool_bytes": 4096}, max_cpu_offload_gb=0.1),
]


@pytest.mark.parametrize("c", EXAMPLES, ids=repr)
def test_round_trips(c: Config) -> None:
    for other in (
        copy.copy(c),
        copy.deepcopy(c),
        pickle.loads(pickle.dumps(c)),
        Config.from_dict(c.to_dict()),
        c.replace(),
        eval(repr(c)),
    ):
        assert other is not c
        assert other == c
        assert repr(other) == repr(c)


def test_replace_leaves_the_original_alone() -> None:
    c = Config(budget="1GiB")
    assert c.replace(mode="aggressive", budget=None).budget is None
    assert c.budget == 1 << 30
    with pytest.raises(_C.ConfigError, match="warmup_steps"):
        c.replace(budget="2GiB", warmup_steps=-1)
    assert c.budget == 1 << 30


def test_to_dict() -> None:
    c = Config(mode="aggressive", async_config=AsyncOffloadConfig(debug=True))
    assert c.to_dict() == {
        "mode": "aggressive",
        "async_config": {
            "pinned_pool_bytes": 256 << 20,
            "prefetch_depth": 2,
            "debug": True,
        },
    }
    everything = c.to_dict(include_defaults=True)
    assert list(everything) == [field.name for field in Config.fields()]


def test_signature_and_docstring_come_from_the_table() -> None:
    parameters = inspect.signature(Config).parameters
    assert list(parameters) == [field.name for field in Config.fields()]
    assert parameters["warmup_steps"].default == 2
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    for field in Config.fields():
        assert f"{field.name}: {field.type} = {field.default_text}" in (
            Config.__doc__ or ""
        )
        assert getattr(Config, field.name).__doc__ == field.doc


def test_stub_names_every_field() -> None:
    stub = (DOCS.parent / "python/memscale/_C.pyi").read_text()
    for cls in (Config, AsyncOffloadConfig):
        for field in cls.fields():
            assert f"    {field.name}: " in stub


def test_docs_hold_the_table() -> None:
    assert config.markdown() in (DOCS / "config.md").read_text(), (
        "docs/config.md is out of date: put the output of "
        "`tools/print_tables.py config` into it"
    )


def test_sizes() -> None:
    assert config.parse_bytes("1.5 GiB") == 1610612736
    assert config.format_bytes(1610612736) == "1.50 GiB"
    assert config.format_bytes(512) == "512 bytes"
    assert config.parse_bytes(4096) == 4096
    with pytest.raises(_C.ParseError, match="unknown unit 'k'"):
        config.parse_bytes("3k")
    with pytest.raises(_C.ParseError, match="negative"):
        config.parse_bytes(-1)
    with pytest.raises(TypeError):
        config.parse_bytes(1.5)  # type: ignore[arg-type]


@hypothesis.given(st.integers(min_value=1, max_value=2**63 - 1))
def test_budget_survives_repr(count: int) -> None:
    c = Config(budget=count)
    assert eval(repr(c)).budget == count


@hypothesis.given(
    st.sampled_from([f.name for f in Config.fields()]),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(st.characters(codec="utf-8")),
        st.lists(st.integers()),
    ),
)
def test_any_value_is_taken_or_refused_with_a_config_error(
    name: str, value: object
) -> None:
    try:
        c = Config(**{name: value})  # type: ignore[arg-type]
    except _C.ConfigError as refused:
        message = str(refused)
        c = Config()
    else:
        message = name
    assert name in message
    assert c == Config.from_dict(c.to_dict())
    c.resolve()


def test_command_line_options_come_from_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    for field in Config.fields():
        if not field.type.startswith("record"):
            option = "--" + field.name.replace("_", "-")
            assert option in parser.format_help()
    words = "--budget 6GiB --mode aggressive --enable-tiling false --warmup-steps 3"
    parsed = config.from_arguments(parser.parse_args(words.split()))
    assert parsed == Config(
        budget="6GiB", mode="aggressive", enable_tiling=False, warmup_steps=3
    )
    assert config.from_arguments(parser.parse_args([])) == Config()
    for bad, rule in {
        "--budget banana": "budget",
        "--warmup-steps 2.5": "warmup_steps must be an integer",
        "--enable-tiling maybe": "enable_tiling must be True or False",
        "--observability-port 0": "observability_port must be",
    }.items():
        with pytest.raises(SystemExit):
            parser.parse_args(bad.split())
        assert rule in capsys.readouterr().err


def test_errors_are_public() -> None:
    assert issubclass(memscale.ConfigError, (memscale.Error, ValueError))
    with pytest.raises(memscale.ConfigError, match="did you mean 'budget'"):
        Config(buget="6GiB")  # type: ignore[call-arg]
