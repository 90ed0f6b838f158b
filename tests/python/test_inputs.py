"""What a model may be called with, and where its loss comes from."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import memscale
from memscale.model.inputs import STAND_IN, build_call, describe, find_loss, read_call

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")


class Sum(nn.Module):
    """Takes one or two tensors, by place or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(x if y is None else x + y)


X, Y = torch.randn(2, 4), torch.randn(2, 4)
TARGET = torch.tensor([0, 2])


class TestReadCall:
    @pytest.mark.parametrize(
        ("sample", "args", "kwargs"),
        [
            (X, (X,), {}),
            ((X,), (X,), {}),
            ((X, Y), (X, Y), {}),
            ([X, Y], (X, Y), {}),
            ([X, None], (X, None), {}),
            ({"x": X, "y": Y}, (), {"x": X, "y": Y}),
            (UserDict(x=X), (), {"x": X}),
            (BatchEncoding({"x": X}), (), {"x": X}),
        ],
        ids=["tensor", "one", "tuple", "list", "none", "dict", "mapping", "tokenizer"],
    )
    def test_a_sample(self, sample: Any, args: Any, kwargs: Any) -> None:
        call = read_call(sample)
        assert len(call.args) == len(args)
        assert all(a is b for a, b in zip(call.args, args, strict=True))
        assert call.kwargs.keys() == kwargs.keys()
        assert all(call.kwargs[key] is kwargs[key] for key in kwargs)
        assert not call.has_target
        assert call.run(Sum()).shape == (2, 3)

    def test_a_pair_with_a_loss_of_two_arguments(self) -> None:
        for loss_fn in (F.cross_entropy, nn.CrossEntropyLoss(), lambda a, b: a.sum()):
            for sample in ((X, TARGET), [X, TARGET]):
                call = read_call(sample, loss_fn)
                assert call.args[0] is X
                assert len(call.args) == 1
                assert call.has_target
                assert call.target is TARGET

    def test_more_than_a_pair(self) -> None:
        call = read_call((X, Y, TARGET), F.cross_entropy)
        assert len(call.args) == 2
        assert call.target is TARGET

    def test_the_whole_mapping_is_the_target(self) -> None:
        batch = {"x": X, "y": Y}
        call = read_call(batch, lambda output, batch: output.sum() + batch["y"].sum())
        assert call.kwargs == batch
        assert call.target == batch

    def test_a_loss_of_one_argument_takes_no_target(self) -> None:
        for loss_fn in (lambda out: out.sum(), lambda out, scale=2: out.sum() * scale):
            call = read_call((X, Y), loss_fn)
            assert len(call.args) == 2
            assert not call.has_target

    @pytest.mark.parametrize(
        ("sample", "loss_fn", "message"),
        [
            (X, F.cross_entropy, r"\(inputs, target\).*got float32\[2, 4\]"),
            ((X,), F.cross_entropy, r"\(inputs, target\).*got 1 element"),
            ({1: X}, None, r"names as keys, got \[1\]"),
            ("text", None, "a mapping, got str"),
            (3, None, "a mapping, got int"),
            (iter([X]), None, "a mapping, got list_iterator"),
            (
                torch.utils.data.DataLoader([X]),
                None,
                r"got DataLoader: pass one batch of it, next\(iter\(loader\)\)",
            ),
        ],
    )
    def test_errors(self, sample: Any, loss_fn: Any, message: str) -> None:
        with pytest.raises(memscale.InputError, match=message) as caught:
            read_call(sample, loss_fn)
        assert isinstance(caught.value, ValueError)

    def test_tensors_inside_of_others(self) -> None:
        call = read_call(([X, {"y": Y}], 3))
        assert [t is u for t, u in zip(call.tensors(), [X, Y], strict=True)] == [
            True,
            True,
        ]
        doubled = call.map_tensors(lambda t: 2 * t)
        assert torch.equal(doubled.args[0][1]["y"], 2 * Y)
        assert doubled.args[1] == 3

    def test_said_in_words(self) -> None:
        call = read_call({"x": X, "scale": 2, "mode": "a", "mask": None, "z": [X]})
        assert (
            str(call) == "x=float32[2, 4] on cpu, scale=2, mode='a', mask=None, z=list"
        )
        assert str(read_call(())) == "no arguments"
        assert describe(torch.ones((), dtype=torch.bool)) == "bool[] on cpu"


def _grads(value: torch.Tensor) -> torch.Tensor:
    return value.clone().requires_grad_()


class TestFindLoss:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda loss: loss,
            lambda loss: (loss, X),
            lambda loss: {"loss": loss, "logits": X},
            lambda loss: SimpleNamespace(loss=loss),
            lambda loss: UserDict(loss=loss),
        ],
        ids=["tensor", "tuple", "dict", "attribute", "mapping"],
    )
    def test_the_models_own(self, wrap: Any) -> None:
        loss = _grads(torch.tensor(1.0))
        found, source = find_loss(wrap(loss), read_call(X), None)
        assert found is loss
        assert source == "the model's own"

    def test_a_single_number_without_gradient_is_none(self) -> None:
        output = {"loss": torch.tensor(1.0), "logits": _grads(X)}
        _, source = find_loss(output, read_call(X), None)
        assert source == STAND_IN

    def test_a_stand_in_uses_every_output(self) -> None:
        outputs = [_grads(X), {"more": _grads(Y)}, torch.tensor([1, 2]), X]
        loss, source = find_loss(outputs, read_call(X), None)
        assert source == STAND_IN
        assert torch.equal(loss, X.square().mean() + Y.square().mean())

    def test_nothing_to_train(self) -> None:
        loss, source = find_loss((X, TARGET), read_call(X), None)
        assert loss is None
        assert source.startswith("none")

    def test_a_function(self) -> None:
        call = read_call((X, TARGET), F.cross_entropy)
        logits = _grads(X)
        loss, source = find_loss(logits, call, F.cross_entropy)
        assert torch.equal(loss, F.cross_entropy(logits, TARGET))
        assert source == "loss_fn"


class TestEstimates:
    """The same bytes, however the batch is passed."""

    def test_of_every_kind_of_sample(self) -> None:
        model = Sum()
        samples = [(X, Y), [X, Y], {"x": X, "y": Y}, BatchEncoding({"x": X, "y": Y})]
        traces = [memscale.estimate(model, sample).trace for sample in samples]
        assert traces == [traces[0]] * len(samples)
        one = [memscale.estimate(model, sample).trace for sample in (X, (X,), [X])]
        assert one == [one[0]] * 3
        assert one[0] != traces[0]

    def test_of_losses(self) -> None:
        model = Sum()
        pair = (X, TARGET)
        function = memscale.estimate(model, pair, loss_fn=F.cross_entropy)
        module = memscale.estimate(model, pair, loss_fn=nn.CrossEntropyLoss())
        assert function.loss == module.loss == "loss_fn"
        assert function.trace == module.trace
        stand_in = memscale.estimate(model, X)
        assert stand_in.loss == STAND_IN
        weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
        e = memscale.estimate(model, pair, loss_fn=weighted)
        assert "aten::nll_loss_forward" in {op.name for op in _ops(e)}

    def test_a_loss_with_weights_moves_to_the_target(self) -> None:
        weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
        e = memscale.estimate(Sum(), (X, TARGET), loss_fn=weighted, device="sim")
        assert e.device.type == "sim"
        assert weighted.weight.device.type == "cpu"

    def test_a_loss_of_a_whole_batch(self) -> None:
        def loss_fn(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
            return F.mse_loss(output, batch["y"][:, :3])

        e = memscale.estimate(Sum(), {"x": X, "y": Y}, loss_fn=loss_fn)
        assert e.loss == "loss_fn"


def _ops(estimate: memscale.Estimate) -> list[Any]:
    return [estimate.trace[i] for i in range(len(estimate.trace))]


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert(kind: Any = BertForSequenceClassification) -> nn.Module:
    return kind(BertConfig(vocab_size=64, intermediate_size=64, **SMALL))


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(image_size=32, patch_size=8, intermediate_size=64, **SMALL)
    )


class TestBuiltCalls:
    @pytest.mark.parametrize(
        ("make", "shapes"),
        [
            (gpt2, {"input_ids": (3, 16), "labels": (3, 16)}),
            (bert, {"input_ids": (3, 16), "labels": (3,)}),
            (t5, {"input_ids": (3, 16), "labels": (3, 16)}),
            (vit, {"pixel_values": (3, 3, 32, 32), "labels": (3,)}),
        ],
        ids=["gpt2", "bert", "t5", "vit"],
    )
    def test_of_hugging_faces_models(self, make: Any, shapes: Any) -> None:
        model = make()
        call = build_call(model, batch=3, length=16)
        assert {k: tuple(v.shape) for k, v in call.kwargs.items()} == shapes
        e = memscale.estimate(model, batch=3, length=16)
        assert e.loss == "the model's own"
        assert e.method == "static"
        assert e.inputs == "built for batch 3, length 16"
        assert "backward" in e.phases
        given = memscale.estimate(model, call.kwargs)
        assert given.trace == e.trace
        assert memscale.estimate(model, batch=6, length=16).peak_bytes > e.peak_bytes

    def test_without_a_loss_of_its_own(self) -> None:
        e = memscale.estimate(bert(BertModel), batch=2, length=8)
        assert e.loss == STAND_IN

    def test_too_long(self) -> None:
        with pytest.raises(memscale.InputError, match="32 positions, got 33"):
            memscale.estimate(gpt2(), length=33)

    def test_a_model_that_says_nothing(self) -> None:
        with pytest.raises(memscale.InputError, match="sample_input is needed: Sum"):
            memscale.estimate(Sum())

    def test_a_model_with_dummy_inputs(self) -> None:
        model = Sum()
        model.dummy_inputs = {"x": X}
        assert memscale.estimate(model).trace == memscale.estimate(model, X).trace
