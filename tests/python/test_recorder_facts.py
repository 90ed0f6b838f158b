"""What a trace tells of each op, so that tapes need not guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memscale
from memscale._C import Op, Recorder, Trace

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


def ops_of(program: Any) -> list[Op]:
    recorder = Recorder(torch.device("cpu"), FakeTensor, fake_run=False)
    recorder.start()
    program()
    recorder.stop()
    trace = recorder.finish()
    return [trace[i] for i in range(len(trace))]


def only(program: Any) -> Op:
    (op,) = ops_of(program)
    return op


def _normalises(norm: nn.Module, x: torch.Tensor) -> Op:
    (op,) = [op for op in ops_of(lambda: norm(x)) if "batch_norm" in op.name]
    return op


class TestUses:
    def test_reads_updates_and_overwrites(self) -> None:
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        assert only(lambda: x.add(y)).accesses == ["read", "read"]
        assert only(lambda: x.add_(y)).accesses == ["update", "read"]
        assert only(lambda: x.copy_(y)).accesses == ["overwrite", "read"]
        assert only(lambda: torch.add(x, x, out=y)).accesses[-1] == "overwrite"

    def test_a_part_of_a_storage_is_not_all_of_it(self) -> None:
        x = torch.randn(4, 4)
        part = x[1:]
        assert only(part.zero_).accesses == ["update"]
        assert only(x.zero_).accesses == ["overwrite"]

    def test_statistics_are_scratch_while_training(self) -> None:
        norm = nn.BatchNorm1d(4, affine=False)
        norm.num_batches_tracked = None
        x = torch.randn(8, 4)
        assert _normalises(norm, x).accesses.count("scratch") == 2
        norm.eval()
        assert "scratch" not in _normalises(norm, x).accesses

    def test_what_autograd_made_is_no_leaf(self) -> None:
        weight = torch.randn(4, 4, requires_grad=True)
        made = weight * 2
        assert only(lambda: weight + made).from_leaves == [True, False]
        assert only(lambda: weight + made.detach()).from_leaves[0] is True


class TestCalls:
    def test_views_are_told_by_their_schema(self) -> None:
        x = torch.randn(4, 4)
        assert only(lambda: x.view(16)).aliases
        # It returns its input's bytes, and its schema does not say so.
        unsafe = only(lambda: torch.ops.aten._unsafe_view(x, [16]))
        assert unsafe.view
        assert not unsafe.aliases

    def test_accumulating(self) -> None:
        x, at, by = torch.zeros(4), (torch.tensor([0, 0]),), torch.ones(2)
        assert only(lambda: x.index_put_(at, by, accumulate=True)).accumulates
        assert not only(lambda: x.index_put_(at, by)).accumulates


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(self.inner(x))
        return out


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class _WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Scale.apply(self.inner(x))
        return out


def _trace(model: nn.Module) -> Trace:
    return memscale.estimate(model, torch.randn(2, 4), "sgd").trace


class TestEvents:
    def test_two_calls_of_a_layer_in_a_row(self) -> None:
        events = _trace(_Twice()).events
        inner = [kind for kind, _, layer in events if layer == "inner"]
        assert inner == ["enter_layer", "leave_layer"] * 2
        assert events[0][0] == "enter_layer"
        assert events[-1][0] == "leave_layer"

    def test_a_function_begins_and_ends(self) -> None:
        trace = _trace(_WithFunction())
        kinds = [kind for kind, _, _ in trace.events]
        begin = trace.events[kinds.index("enter_function")][1]
        end = trace.events[kinds.index("leave_function")][1]
        assert [trace[i].in_function for i in range(begin, end)] == [True]

    def test_a_file_of_another_version_is_refused(self) -> None:
        text = _trace(_Twice()).to_json()
        assert Trace.from_json(text).events == _trace(_Twice()).events
        with pytest.raises(memscale.TraceError, match="version must be 3, got 2"):
            Trace.from_json(text.replace('"version":3', '"version":2', 1))
