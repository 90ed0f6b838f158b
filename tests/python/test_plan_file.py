"""``Config(plan=...)``: plans from objects, texts and files, whatever is in them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memscale
from compat_twins import copy_of, untouched_process  # noqa: F401
from memscale import Config, PlanError
from memscale._C import Plan
from memscale.attach import planner
from memscale.estimation import estimate
from never_wrapped import assert_as_never_wrapped
from test_plan_budget import Blocks, _batch, _model


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memscale.plan(_model(), _batch(), config=Config(force_optimize=True))


def _refused(source: Any, text: str) -> str:
    """wrap raises PlanError, in one short line, and nothing is attached."""
    model, twin = _model(), _model()
    with pytest.raises(PlanError, match=text) as error:
        memscale.wrap(model, Config(plan=source))
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)
    assert_as_never_wrapped(model, twin)
    return str(error.value)


@pytest.mark.parametrize("kind", ["plan", "json", "path", "text path"])
def test_a_plan_is_followed_without_tracing(
    kind: str, plan: Plan, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    sources = {
        "plan": plan,
        "json": "\n " + plan.to_json(),
        "path": file,
        "text path": str(file),
    }

    def trace(*args: Any, **options: Any) -> None:
        raise AssertionError("it was traced")

    monkeypatch.setattr(estimate, "trace_step", trace)
    monkeypatch.setattr(planner, "estimate_step", trace)
    model = _model()
    twin = copy_of(model)
    memscale.wrap(model, Config(plan=sources[kind]))
    assert model._memscale_executor.plan == plan
    loss, expected = model(_batch()), twin(_batch())
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)
    assert model._memscale_executor.stats().saves_dropped > 0
    memscale.detach(model)
    assert_as_never_wrapped(model, twin)


def _edited(plan: Plan, change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(plan.to_json())
    change(data)
    return json.dumps(data)


def test_a_plan_of_another_model(plan: Plan) -> None:
    other = memscale.plan(Blocks(depth=3), _batch(), config=Config(force_optimize=True))
    text = _refused(other, "the plan must be of this model")
    assert "'Blocks' with 5 layers instead of 6" in text
    renamed = _edited(plan, lambda d: d["layers"][1].update(layer="block"))
    _refused(renamed, "whose layer 1 is 'block' instead of 'blocks'")


@pytest.mark.parametrize("width", [128, 512])
def test_a_plan_of_a_model_of_another_width(width: int) -> None:
    """Names and ops are the same: the plan would be followed, its bytes are others."""
    batch = torch.randn(512, width)
    other = memscale.plan(Blocks(width), batch, config=Config(force_optimize=True))
    text = _refused(other, "the plan must be of this model, but it is of 'Blocks'")
    made_for, here = (2 * 4 * (w * w + w) for w in (width, 256))
    assert "layer 2, 'blocks.0', has" in text
    assert f"(layers[2].parameter_bytes is {made_for})" in text
    assert f"({here}): make a plan for this model" in text


def test_a_plan_of_a_model_of_another_type(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"'blocks\.0', has 514\.00 KiB of parameters"):
        memscale.wrap(_model().to(torch.bfloat16), Config(plan=plan))


def test_an_earlier_plan_without_sizes_is_followed_and_said(
    plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="memscale"):
        memscale.detach(memscale.wrap(_model(), Config(plan=plan)))
        assert "how large its layers' parameters are" not in caplog.text
        earlier = _edited(plan, _as_version_1)
        model = memscale.wrap(_model(), Config(plan=earlier))
    assert "how large its layers' parameters are" in caplog.text
    # And it is the same plan.
    followed = model._memscale_executor.plan
    assert followed.diff(plan) == ""
    for now, then in zip(plan.layers, followed.layers, strict=True):
        assert (now.technique, now.nanoseconds) == (then.technique, then.nanoseconds)
        assert (now.keep_set, now.policy) == (then.keep_set, then.policy)
    memscale.detach(model)


def _as_version_1(data: dict[str, Any]) -> None:
    """A field for each technique, and no sizes of parameters."""
    data.update(version=1, optimizer_bits=32)
    assert data.pop("choices") == []
    for layer in data["layers"]:
        layer.pop("parameter_bytes")
        choice = next(iter(layer.pop("choices")), {})
        keep_set = choice.get("keep_set")
        layer.update(
            policy="keep" if keep_set else choice.get("choice", "keep"),
            keep_set=keep_set,
            nanoseconds=choice.get("nanoseconds", 0),
            reason=choice.get("reason", ""),
        )


def test_a_plan_of_another_batch_is_followed_and_said_once(
    plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    model = memscale.wrap(_model(), Config(plan=plan))
    with caplog.at_level("INFO", logger="memscale"):
        model(_batch()).backward()
        assert "is not of this one" not in caplog.text
        for _ in range(2):
            model(_batch()[:64]).backward()
    said = [text for text in caplog.messages if "is not of this one" in text]
    assert len(said) == 1
    assert (
        "made for float32[512, 256] on cpu, this batch is float32[64, 256]" in said[0]
    )
    memscale.detach(model)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.update(version=3), "version must be 1 or 2, got 3"),
        (lambda d: d.update(format="memscale-trace"), "format must be"),
        (lambda d: d.pop("layers"), "layers is missing"),
        (lambda d: d.update(layers=[]), "layers must not be empty"),
        (lambda d: d.update(layers={}), "layers must be an array"),
        (lambda d: d.update(peak="much"), "peak must be an integer"),
        (lambda d: d.update(peak=-1), "peak must be >= 0"),
        (lambda d: d.update(colour=1), "a plan has no field 'colour'"),
        (lambda d: d.update(mode="quick"), "mode must be one of"),
        (
            lambda d: d["layers"][2]["choices"][0].update(choice="drop"),
            r"layers\[2\].choices\[0\].choice must be one of cheap, block, chosen",
        ),
        (
            lambda d: d["layers"][2]["choices"][0].update(technique="drop"),
            r"layers\[2\].choices\[0\].technique must be one of recompute, got 'drop'",
        ),
        (lambda d: d["layers"].append(d["layers"][0]), "there twice"),
        (
            lambda d: d["layers"][2]["choices"][0].update(
                choice="chosen", keep_set={"ops": ["a"], "kept": [[0, 1], [0, 0]]}
            ),
            r"layers\[2\].choices\[0\].keep_set.kept must be sorted",
        ),
        (
            lambda d: d["layers"][2]["choices"][0].update(
                choice="chosen", keep_set={"ops": [], "kept": [[0, 0]]}
            ),
            r"layers\[2\].choices\[0\].keep_set.kept\[0\] must name one of 0 ops",
        ),
    ],
)
def test_plans_edited_into_nonsense(
    plan: Plan, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    _refused(_edited(plan, change), text)


def test_a_keep_set_of_other_ops_changes_no_bits(plan: Plan) -> None:
    """What is well-formed but not true of the model: each call is looked at."""
    wrong = {"ops": ["aten::mm", "aten::no_such_op"], "kept": [[1, 9]]}
    choice = {
        "technique": "recompute",
        "choice": "chosen",
        "keep_set": wrong,
        "bytes": 0,
        "nanoseconds": 0,
        "reason": "",
    }
    edited = _edited(
        plan, lambda d: [layer.update(choices=[choice]) for layer in d["layers"]]
    )
    model, twin = _model(), _model()
    memscale.wrap(model, Config(plan=edited))
    loss, expected = model(_batch()), twin(_batch())
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)
    memscale.detach(model)


def test_cut_plans(plan: Plan, tmp_path: pathlib.Path) -> None:
    text = plan.to_json()
    for size in (1, 30, len(text) // 2, len(text) - 1):
        _refused(text[:size], "a plan must be JSON, got an error at byte")
    file = tmp_path / "cut.json"
    file.write_text(text[:100], encoding="utf-8")
    _refused(file, "a plan must be JSON, got an error at byte 101")


def test_files_that_hold_no_plan(tmp_path: pathlib.Path) -> None:
    _refused(tmp_path / "none.json", "No such file")
    _refused(str(tmp_path), "Is a directory")
    binary = tmp_path / "model.bin"
    binary.write_bytes(bytes(range(256)) * 100)
    _refused(binary, "'utf-8' codec can't decode byte 0x80")
    empty = tmp_path / "empty.json"
    empty.touch()
    _refused(empty, "a plan must be JSON, got an error at byte 1")
    _refused("a\0b", "embedded null byte")
    _refused("x" * 10_000, "File name too long")


def test_a_file_of_a_terabyte_is_not_read(tmp_path: pathlib.Path) -> None:
    """A checkpoint, named by mistake: here a hole, which takes no disk."""
    file = tmp_path / "checkpoint.bin"
    with file.open("wb") as out:
        out.truncate(1 << 40)
    _refused(file, "a plan must not be longer than 32.00 MiB")


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("[", "File name too long"),
        ('{"a":[', "a plan must not be longer than 32.00 MiB"),
        ('{"', "a plan must not be longer than 32.00 MiB"),
    ],
)
def test_a_hundred_megabytes(start: str, text: str, tmp_path: pathlib.Path) -> None:
    filler = start[-1] if start[-1] == "[" else "a"
    source = start + filler * 100_000_000
    _refused(source, text)
    file = tmp_path / "huge.json"
    file.write_text(source, encoding="utf-8")
    _refused(file, "a plan must not be longer than 32.00 MiB")
    file.write_text(source[:30_000_000], encoding="utf-8")
    if filler == "[":
        _refused(file, "a plan must not nest deeper than 10 levels")
