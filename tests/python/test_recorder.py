"""The recorder on real ops: what it sees, when, and whose."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

import memscale
from memscale._C import Recorder, SaveHandle, Timeline, Trace

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

CPU = torch.device("cpu")


def recorder() -> Recorder:
    return Recorder(CPU, FakeTensor, fake_run=False)


@contextmanager
def recording(of: Recorder) -> Iterator[Recorder]:
    of.start()
    try:
        yield of
    finally:
        of.stop()


def names(trace: Trace) -> list[str]:
    return [trace[i].name for i in range(len(trace))]


def data_of(trace: Trace) -> Any:
    return json.loads(trace.to_json())


class TestWhatIsSeen:
    def test_outermost_ops_between_start_and_stop(self) -> None:
        x = torch.randn(4, 4)
        r = recorder()
        x.exp()
        with recording(r):
            torch.nn.functional.linear(x, x).sin()  # matmul decomposes
        x.cos()
        trace = r.finish()
        assert names(trace) == ["aten::t", "aten::mm", "aten::sin"]
        assert {trace[i].phase for i in range(3)} == {"forward"}

    def test_nothing_while_paused(self) -> None:
        x = torch.randn(4)
        with recording(recorder()) as r:
            x.exp()
            r.pause()
            r.pause()  # they count
            x.sin()
            r.resume()
            x.sin()
            r.resume()
            x.cos()
        assert names(r.finish()) == ["aten::exp", "aten::cos"]

    def test_not_other_threads(self) -> None:
        x = torch.randn(4)
        with recording(recorder()) as r:
            thread = threading.Thread(target=x.sin)
            thread.start()
            thread.join()
            x.exp()
        assert names(r.finish()) == ["aten::exp"]

    def test_each_thread_may_have_its_own(self) -> None:
        x = torch.randn(4)
        inside = recorder()

        def work() -> None:
            with recording(inside):
                x.sin()

        with recording(recorder()) as outside:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            x.exp()
        assert names(inside.finish()) == ["aten::sin"]
        assert names(outside.finish()) == ["aten::exp"]

    def test_backward_of_autograd(self) -> None:
        w = torch.randn(4, requires_grad=True)
        with recording(recorder()) as r:
            loss = w.exp().sum()
            loss.backward()
        trace = r.finish()
        data = data_of(trace)
        backward = [op for op in data["ops"] if op["phase"] == "backward"]
        (mul,) = [op for op in backward if op["name"] == "aten::mul.Tensor"]
        assert data["ops"][mul["forward"]]["name"] == "aten::exp"

    def test_an_op_that_fails_is_survived(self) -> None:
        x = torch.randn(4, 3)
        with recording(recorder()) as r:
            x.exp()
            with pytest.raises(RuntimeError):
                torch.mm(x, x)
            x.sin()
        seen = names(r.finish())
        assert [name for name in seen if name != "aten::mm"] == [
            "aten::exp",
            "aten::sin",
        ]

    def test_autocast_shows_what_really_runs(self) -> None:
        x = torch.randn(4, 4)
        with recording(recorder()) as r, torch.autocast("cpu", torch.bfloat16):
            torch.mm(x, x)
        data = data_of(r.finish())
        (mm,) = [op for op in data["ops"] if op["name"] == "aten::mm"]
        dtypes = {data["values"][value]["dtype"] for value in mm["inputs"]}
        assert dtypes == {"bfloat16"}


class TestStorages:
    def test_are_held_as_long_as_a_tensor_is(self) -> None:
        x = torch.randn(256)
        with recording(recorder()) as r:
            r.add_resident(x, "inputs")
            a = x.exp()
            b = a.sin()
            del a
            c = b.cos()
            del b
            d = c.tan()
            del c
        trace = r.finish()
        held = [instant.bytes for instant in Timeline(trace, "device", 1)]
        assert held == [2048, 3072, 3072, 3072]
        assert d.shape == (256,)

    def test_a_view_keeps_its_base(self) -> None:
        x = torch.randn(256)
        with recording(recorder()) as r:
            r.add_resident(x, "inputs")
            part = x.exp()[:1]
            part.sin()
        held = [i.bytes for i in Timeline(r.finish(), "device", 1)]
        assert held == [2048, 2048, 2052]

    def test_addresses_that_are_used_again_are_other_storages(self) -> None:
        x = torch.randn(1024)
        with recording(recorder()) as r:
            for _ in range(8):
                x.exp()
        data = data_of(r.finish())
        made = [s for s in data["storages"] if s["born"] is not None]
        assert [s["born"] for s in made] == list(range(8))
        assert [s["freed"] for s in made] == list(range(8))

    def test_what_was_there_before_is_an_input(self) -> None:
        x = torch.randn(8)
        with recording(recorder()) as r:
            x.exp()
        (before, made) = data_of(r.finish())["storages"]
        assert before["born"] is None
        assert before["category"] == "inputs"
        assert made["born"] == 0

    def test_a_resident_is_told_once(self) -> None:
        x = torch.randn(8)
        r = recorder()
        layer = r.add_layer("a")
        r.add_resident(x, "parameters", layer)
        r.add_resident(x, "inputs")
        r.add_resident(x[2:], "buffers")
        data = data_of(r.finish())
        (storage,) = data["storages"]
        assert storage["category"] == "parameters"
        assert storage["layer"] == layer
        assert storage["bytes"] == 32

    def test_that_grow(self) -> None:
        with recording(recorder()) as r:
            out = torch.empty(0)
            torch.add(torch.ones(64), 1, out=out)
        data = data_of(r.finish())
        assert max(s["bytes"] for s in data["storages"]) == 256
        with_out = [op for op in data["ops"] if op["name"] == "aten::add.out"]
        assert all(op["mutates"] for op in with_out)

    def test_on_the_host_and_on_the_device(self, sim: torch.device) -> None:
        r = Recorder(sim, FakeTensor, fake_run=False)
        x = torch.randn(256, device=sim)
        with recording(r):
            x.exp().cpu().sin()
        trace = r.finish()
        device = [i.bytes for i in Timeline(trace, "device", 1)]
        host = [i.bytes for i in Timeline(trace, "host", 1)]
        assert max(device) == 2048
        assert max(host) == 2048
        assert host[0] == 0


class TestSaves:
    def test_are_counted_and_released(self) -> None:
        w = torch.randn(64, requires_grad=True)
        r = recorder()
        with recording(r):
            with saved_tensors_hooks(r.save, SaveHandle.unpack):
                loss = (w * w).sin().sum()
            r.set_phase("backward")
            loss.backward()
            del loss
        data = data_of(r.finish())
        ops = [data["ops"][save["op"]]["name"] for save in data["saves"]]
        assert ops == ["aten::mul.Tensor", "aten::mul.Tensor", "aten::sin"]
        assert all(save["released"] is not None for save in data["saves"])

    def test_hold_their_storage(self) -> None:
        x = torch.randn(256)
        with recording(recorder()) as r:
            made = x.exp()
            handle = r.save(made)
            del made
            x.sin()
            del handle
            x.cos()
        data = data_of(r.finish())
        saved = data["storages"][data["values"][data["saves"][0]["value"]]["storage"]]
        assert saved["born"] == 0
        assert saved["freed"] == 1
        assert data["saves"][0]["released"] == 1

    def test_tell_when_the_program_lets_go(self) -> None:
        x = torch.randn(256)
        with recording(recorder()) as r:
            made = x.exp()
            handles = [r.save(made), r.save(made.view(16, 16))]
            x.sin()
            seen = made.view(2, 128)
            del made
            x.cos()
            del seen
            x.tan()
            handles.clear()
        trace = r.finish()
        assert names(trace)[4:] == ["aten::cos", "aten::tan"]
        saved = data_of(trace)["storages"][1]
        assert (saved["born"], saved["let_go"], saved["freed"]) == (0, 4, 5)

    def test_what_the_model_returns_is_told(self) -> None:
        x = torch.randn(4)
        with recording(recorder()) as r:
            r.set_returned(x.exp().view(2, 2))
            x.sin()
        storages = data_of(r.finish())["storages"]
        assert [s["returned"] for s in storages] == [False, True, False]

    def test_without_holding_the_tensor(self) -> None:
        x = torch.randn(256)
        with memscale.memory.track("cpu") as memory, recording(recorder()) as r:
            made = x.exp()
            handle = r.save(made, hold=False)
            del made
            assert memory.current == memory.before
            x.sin()
            del handle
        data = data_of(r.finish())
        # As if it had been held: what a checkpoint drops is recorded as kept.
        assert data["storages"][1]["freed"] == 1


class TestLayersAndPhases:
    def test_nest(self) -> None:
        x = torch.randn(4)
        r = recorder()
        a, b = r.add_layer("a"), r.add_layer("a.b")
        with recording(r):
            x.exp()
            r.enter_layer(a)
            x.exp()
            r.enter_layer(b)
            x.exp()
            r.leave_layer()
            x.exp()
            r.leave_layer()
            x.exp()
            r.leave_layer()  # one too many does no harm
            r.set_phase("optimizer")
            x.exp()
        trace = r.finish()
        seen = [(trace[i].layer, trace[i].phase) for i in range(len(trace))]
        assert seen == [
            (None, "forward"),
            ("a", "forward"),
            ("a.b", "forward"),
            ("a", "forward"),
            (None, "forward"),
            (None, "optimizer"),
        ]

    def test_a_stand_in_is_the_same_storage(self) -> None:
        x = torch.randn(8)
        stand_in = torch.randn(8)
        with recording(recorder()) as r:
            r.add_resident(x, "parameters")
            r.bind_same(stand_in, x)
            stand_in.add_(1)
        data = data_of(r.finish())
        (op,) = data["ops"]
        values = [data["values"][v] for v in (op["inputs"][0], *op["outputs"])]
        assert [v["storage"] for v in values] == [0, 0]
        assert [v["version"] for v in values] == [0, 1]
        assert data["storages"][0]["category"] == "parameters"

    def test_notes_are_said_once(self) -> None:
        r = recorder()
        r.add_note("one")
        r.add_note("one")
        r.add_note("two")
        assert r.finish().notes == ["one", "two"]


class TestMisuse:
    def test_reading_before_the_end(self) -> None:
        r = recorder()
        with recording(r), pytest.raises(memscale.TraceError, match="stop recording"):
            r.finish()
        assert len(r.finish()) == 0

    @pytest.mark.parametrize("name", ["set_phase", "set_category"])
    def test_unknown_names(self, name: str) -> None:
        r = recorder()
        args = ("nonsense",) if name == "set_phase" else (torch.ones(1), "nonsense")
        with pytest.raises(memscale.Error, match="nonsense"):
            getattr(r, name)(*args)

    def test_a_handle_outlives_its_recorder(self) -> None:
        r = recorder()
        handle = r.save(torch.randn(4))
        del r
        assert SaveHandle.unpack(handle).shape == (4,)
        del handle
