"""A step traced on fake tensors: which ops, on which bytes, in which order."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import memscale
import models
from memscale._C import Timeline, Trace

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


def traced(
    model: nn.Module, *sample: Any, optimizer: Any = None, **options: Any
) -> Any:
    """The trace as data: every field of trace.h under its own name."""
    trace = memscale.estimate(model, sample, optimizer, **options).trace
    return json.loads(trace.to_json())


def ops_of(data: Any, phase: str) -> list[str]:
    return [op["name"] for op in data["ops"] if op["phase"] == phase]


def op_named(data: Any, name: str) -> Any:
    (op,) = [op for op in data["ops"] if op["name"] == name]
    return op


def storages_of(data: Any, values: list[int]) -> list[int]:
    return [data["values"][value]["storage"] for value in values]


class Function(nn.Module):
    """A weight, and a function of it and the input."""

    def __init__(self, function: Any, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


class TestOps:
    def test_they_are_in_order_with_phase_and_layer(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        data = traced(model, torch.randn(3, 4), loss_fn=torch.sum)
        layers = [layer["name"] for layer in data["layers"]]
        assert layers == ["", "0", "1", "2"]
        seen = [
            (op["name"], op["phase"], layers[op["layer"]])
            for op in data["ops"]
            if op["layer"] is not None and not op["view"]
        ]
        assert seen == [
            ("aten::addmm", "forward", "0"),
            ("aten::tanh", "forward", "1"),
            ("aten::addmm", "forward", "2"),
            ("aten::mm", "backward", "2"),
            ("aten::mm", "backward", "2"),
            ("aten::sum.dim_IntList", "backward", "2"),
            ("aten::tanh_backward", "backward", "1"),
            ("aten::mm", "backward", "0"),
            ("aten::sum.dim_IntList", "backward", "0"),
        ]
        outside = [op["name"] for op in data["ops"] if op["layer"] is None]
        assert outside == ["aten::sum", "aten::ones_like", "aten::expand"]

    def test_a_backward_op_names_the_op_whose_gradient_it_is(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        data = traced(model, torch.randn(3, 4), loss_fn=torch.sum)
        ops = data["ops"]
        links = {
            (op["name"], op["layer"], ops[op["forward"]]["name"])
            for op in ops
            if op["forward"] is not None and not op["view"]
        }
        assert links == {
            ("aten::mm", 3, "aten::addmm"),
            ("aten::sum.dim_IntList", 3, "aten::addmm"),
            ("aten::tanh_backward", 2, "aten::tanh"),
            ("aten::mm", 1, "aten::addmm"),
            ("aten::sum.dim_IntList", 1, "aten::addmm"),
        }
        for op in ops:
            if op["forward"] is not None:
                assert op["phase"] == "backward"
                assert ops[op["forward"]]["phase"] == "forward"
                assert ops[op["forward"]]["layer"] == op["layer"]

    def test_phases_follow_one_another(self) -> None:
        data = traced(models.cnn(), *models.images(), optimizer="sgd")
        phases = [op["phase"] for op in data["ops"]]
        assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
        assert set(phases) == {"forward", "backward", "optimizer"}

    def test_without_an_optimizer_there_is_no_third_phase(self) -> None:
        data = traced(models.cnn(), *models.images())
        assert ops_of(data, "optimizer") == []

    def test_views_share_a_storage(self) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (x @ w).view(-1).unflatten(0, (2, -1))[0].exp().sum()

        data = traced(Function(function, 4, 4), torch.randn(4, 4))
        ops = data["ops"]
        (mm,) = [
            op for op in ops if op["name"] == "aten::mm" and op["phase"] == "forward"
        ]
        (exp,) = [op for op in ops if op["name"] == "aten::exp"]
        assert storages_of(data, mm["outputs"]) == storages_of(data, exp["inputs"])
        assert storages_of(data, exp["outputs"]) != storages_of(data, exp["inputs"])
        views = [op for op in ops if op["view"] and op["phase"] == "forward"]
        assert [op["name"] for op in views] == [
            "aten::view",
            "aten::view",
            "aten::select.int",
        ]
        for view in views:
            assert storages_of(data, view["inputs"]) == storages_of(
                data, view["outputs"]
            )
        assert data["values"][exp["inputs"][0]]["sizes"] == [8]

    def test_in_place_ops_bump_the_version(self) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x * w
            y.add_(1).relu_()
            return y.sum()

        data = traced(Function(function, 4), torch.randn(4))
        first = next(op for op in data["ops"] if op["name"] == "aten::mul.Tensor")
        ops = [
            first,
            op_named(data, "aten::add_.Tensor"),
            op_named(data, "aten::relu_"),
        ]
        values = [data["values"][op["outputs"][0]] for op in ops]
        assert [value["version"] for value in values] == [0, 1, 2]
        assert len({value["storage"] for value in values}) == 1
        assert [op["mutates"] for op in ops] == [False, True, True]

    def test_a_write_through_a_view_bumps_its_base(self) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x * w
            y[0].fill_(1)
            return y.exp().sum()

        data = traced(Function(function, 4), torch.randn(2, 4))
        read = data["values"][op_named(data, "aten::exp")["inputs"][0]]
        assert read["version"] == 1
        assert read["sizes"] == [2, 4]

    def test_random_ops_are_marked(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        for device in ("cpu", "sim"):
            data = traced(model, torch.randn(2, 4), device=device)
            marked = [op for op in data["ops"] if op["random"]]
            assert len(marked) == 1
            assert data["layers"][marked[0]["layer"]]["name"] == "1"

    def test_ops_of_a_custom_function_are_marked(self) -> None:
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x.pow(3)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                (x,) = ctx.saved_tensors
                return 3 * x.square() * gradient

        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return Cube.apply((x * w).exp()).sin().sum()

        data = traced(Function(function, 4), torch.randn(4))
        forward = [op for op in data["ops"] if op["phase"] == "forward"]
        inside = [op["name"] for op in forward if op["in_function"]]
        assert inside == ["aten::pow.Tensor_Scalar"]
        # What it saves is kept until its backward.
        (saved,) = storages_of(data, op_named(data, "aten::exp")["outputs"])
        released = [
            data["ops"][save["released"]]
            for save in data["saves"]
            if data["values"][save["value"]]["storage"] == saved
        ]
        assert len(released) == 2  # exp keeps its own result
        assert all(op["phase"] == "backward" for op in released)

    def test_several_outputs(self) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            values, places = (x * w).topk(2)
            parts = values.split([1, 1], dim=-1)
            return sum(part.sum() for part in parts) + places.sum()

        data = traced(Function(function, 8), torch.randn(3, 8))
        topk = op_named(data, "aten::topk")
        outputs = [data["values"][value] for value in topk["outputs"]]
        assert [(v["dtype"], v["sizes"]) for v in outputs] == [
            ("float32", [3, 2]),
            ("int64", [3, 2]),
        ]
        assert len({v["storage"] for v in outputs}) == 2
        split = op_named(data, "aten::split_with_sizes")
        assert split["view"]
        assert len(split["outputs"]) == 2
        assert set(storages_of(data, split["outputs"])) == {outputs[0]["storage"]}

    def test_tied_weights_are_one_storage(self) -> None:
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
        model[1].weight = model[0].weight
        data = traced(model, torch.zeros(2, 3, dtype=torch.long))
        categories = [storage["category"] for storage in data["storages"]]
        assert categories.count("parameters") == 1
        assert categories.count("gradients") == 1

    def test_parts_of_one_storage_stay_parts(self) -> None:
        class Halves(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                whole = torch.randn(2, 4)
                self.a, self.b = nn.Parameter(whole[0]), nn.Parameter(whole[1])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x * self.a * self.b).sum()

        data = traced(Halves(), torch.randn(4))
        sizes = [s["bytes"] for s in data["storages"] if s["category"] == "parameters"]
        assert sizes == [2 * 4 * 4]


@pytest.fixture
def twice(request: pytest.FixtureRequest) -> Any:
    with torch.library._scoped_library("memscale_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        op = torch.ops.memscale_test.twice.default

        def setup(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        torch.library.register_fake(
            "memscale_test::twice", torch.empty_like, lib=library
        )
        torch.library.register_autograd(
            "memscale_test::twice",
            lambda ctx, gradient: gradient * 2,
            setup_context=setup,
            lib=library,
        )
        yield op


def test_a_foreign_op_is_opaque_and_noted(twice: Any) -> None:
    model = Function(lambda x, w: twice(x * w).sum(), 4)
    data = traced(model, torch.randn(4))
    op = op_named(data, "memscale_test::twice")
    assert op["opaque"]
    assert not op["workspace_known"]
    assert [o["name"] for o in data["ops"] if o["opaque"]] == [op["name"]]
    assert len(data["notes"]) == 1
    assert "memscale_test::twice" in data["notes"][0]


class TestSaves:
    @pytest.mark.parametrize("name", models.MODELS)
    def test_as_many_as_a_real_run_sees(self, name: str) -> None:
        make, batch = models.MODELS[name]
        torch.manual_seed(0)
        model, sample = make(), batch()
        trace = memscale.estimate(model, sample, None).trace
        seen = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append((str(tensor.dtype), [*tensor.shape]))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model(*sample)
        assert trace.saves_known
        assert trace.num_saves == len(seen)
        data = json.loads(trace.to_json())
        values = [data["values"][save["value"]] for save in data["saves"]]
        saved = [(f"torch.{value['dtype']}", value["sizes"]) for value in values]
        for ours, real in zip(saved, seen, strict=True):
            # Of an LSTM's scratch nobody but the kernel knows the size.
            assert ours == real or ours == ("torch.uint8", [0])

    def test_each_is_released_in_backward(self) -> None:
        data = traced(models.bert(), *models.tokens(), optimizer="sgd")
        for save in data["saves"]:
            assert data["ops"][save["op"]]["phase"] == "forward"
            assert data["ops"][save["released"]]["phase"] == "backward"

    def test_they_are_unknown_with_torch_func(self) -> None:
        class PerSample(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                slope = torch.func.vmap(torch.func.grad(lambda r: self.layer(r).sum()))
                return self.layer(x).sum() + slope(x).sum()

        estimate = memscale.estimate(PerSample(), torch.randn(3, 4), None)
        assert estimate.method == "static"
        assert not estimate.trace.saves_known
        assert any("torch.func" in note for note in estimate.notes)


class TestJson:
    @pytest.mark.parametrize("name", ["gpt2", "bert", "cnn"])
    def test_the_same_bytes_twice_and_back(self, name: str) -> None:
        make, batch = models.MODELS[name]
        model, sample = make(), batch()
        FakeTensorMode.cache_clear()
        first = memscale.estimate(model, sample).trace
        second = memscale.estimate(model, sample).trace
        text = first.to_json()
        assert text == second.to_json()
        assert first == second
        back = Trace.from_json(text)
        assert back == first
        assert back.to_json() == text
        other = memscale.estimate(model, sample, "sgd").trace
        assert other != first

    def test_a_trace_read_back_has_the_same_timeline(self) -> None:
        trace = memscale.estimate(models.cnn(), models.images()).trace
        back = Trace.from_json(trace.to_json())
        assert [i.bytes for i in Timeline(back, "device", 512)] == [
            i.bytes for i in Timeline(trace, "device", 512)
        ]

    def test_what_is_held_is_the_instants_bytes(self) -> None:
        timeline = memscale.estimate(models.cnn(), models.images()).timeline
        peak = timeline.peak()
        assert peak is not None
        held = timeline.held(peak.op)
        del timeline  # the entries keep what they point into
        assert sum(each.bytes for each in held) <= peak.bytes
        assert {each.category for each in held} >= {"parameters", "activations"}
        assert [each.bytes for each in held] == sorted(
            (each.bytes for each in held), reverse=True
        )


class TestWhereTheModelIs:
    @pytest.mark.parametrize("name", ["gpt2", "bert", "cnn"])
    @pytest.mark.parametrize("target", ["cpu", "sim"])
    def test_it_does_not_matter(
        self, name: str, target: str, sim: torch.device
    ) -> None:
        make, batch = models.MODELS[name]
        sample = batch()
        on_cpu = make()
        with torch.device("meta"):
            on_meta = make()
        on_sim = make().to(sim)
        texts = [
            memscale.estimate(model, sample, device=target).trace.to_json()
            for model in (on_cpu, on_sim, on_meta)
        ]
        moved = [tensor.to(sim) for tensor in sample]
        texts.append(memscale.estimate(on_cpu, moved, device=target).trace.to_json())
        bare = [tensor.to("meta") for tensor in sample]
        if name == "cnn":  # it looks at no values
            texts.append(memscale.estimate(on_cpu, bare, device=target).trace.to_json())
        assert [text == texts[0] for text in texts] == [True] * len(texts)

    def test_a_target_changes_the_kernels(self) -> None:
        model, batch = models.gpt2(), models.tokens()
        on_cpu = traced(model, *batch, device="cpu")
        on_card = traced(model, *batch, device="RTX 3090")
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ops_of(
            on_cpu, "forward"
        )
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" not in ops_of(
            on_card, "forward"
        )
        assert {s["place"] for s in on_cpu["storages"]} == {"device"}


class TestCategories:
    def test_bytes_of_a_linear_layer(self) -> None:
        model = nn.Linear(4, 8)
        data = traced(model, torch.randn(3, 4), optimizer="adam", loss_fn=torch.sum)
        sums: dict[str, int] = {}
        for s in data["storages"]:
            if s["bytes"] > 8:  # beside numbers
                sums[s["category"]] = sums.get(s["category"], 0) + s["bytes"]
        assert sums["parameters"] == (32 + 8) * 4
        assert sums["gradients"] == (32 + 8) * 4
        assert sums["optimizer_state"] == 2 * (32 + 8) * 4
        assert sums["inputs"] == 3 * 4 * 4
        assert "activations" not in sums  # sum needs nothing of it

    def test_buffers_and_activations(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Sigmoid())
        data = traced(model, torch.randn(16, 8), loss_fn=torch.sum)
        by_category = {
            category: sorted(
                s["bytes"] for s in data["storages"] if s["category"] == category
            )
            for category in ("buffers", "activations")
        }
        assert by_category["buffers"] == [8, 32, 32]
        assert 16 * 8 * 4 in by_category["activations"]

    def test_the_output_is_gone_before_backward(self) -> None:
        def loss_fn(output: torch.Tensor) -> torch.Tensor:
            return output.sum()

        model = nn.Linear(4, 1000)
        data = traced(model, torch.randn(3, 4), loss_fn=loss_fn)
        ops = data["ops"]
        (output,) = storages_of(data, op_named(data, "aten::addmm")["outputs"])
        assert ops[data["storages"][output]["freed"]]["phase"] == "forward"


class Shared(list[Any]):
    """Is not copied: what is written into it in a trace is seen."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


def test_the_loss_is_computed_once() -> None:
    calls = Shared()

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(output.shape))
        return output.square().mean()

    memscale.estimate(nn.Linear(4, 2), torch.randn(3, 4), loss_fn=loss_fn)
    assert calls == [(3, 2)]
