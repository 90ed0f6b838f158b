"""Whole models train on the simulated device exactly as on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import models
from reference_attention import attend_as_sim


@pytest.mark.parametrize("name", models.MODELS)
def test_trains_bit_equal_to_cpu(name: str, sim: torch.device) -> None:
    make_model, make_batch = models.MODELS[name]
    torch.manual_seed(0)
    model, batch = make_model(), make_batch()
    on_cpu = models.train(model, batch, "cpu")
    on_sim = models.train(model, batch, "sim")
    assert models.first_difference(on_cpu, on_sim) is None
    assert on_cpu.steps[-1].loss < on_cpu.steps[0].loss


def test_attention_dropout_trains_bit_equal_to_its_reference(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused attention with dropout is the device's own: compare its reference."""
    torch.manual_seed(0)
    model, batch = models.gpt2(attention_dropout=0.1), models.tokens()
    on_sim = models.train(model, batch, "sim")
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attend_as_sim)
    on_cpu = models.train(model, batch, "cpu")
    assert models.first_difference(on_cpu, on_sim) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_rounds_as_the_cpu_does(dtype: torch.dtype, sim: torch.device) -> None:
    """Dividing by 1 - p and multiplying by 1 / (1 - p) differ in the last bit."""
    x = torch.randn(1000).to(dtype)
    for p in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.55, 0.7, 0.85, 0.95):
        results = []
        for device in ("cpu", "sim"):
            leaf = x.clone().to(device).requires_grad_()
            torch.manual_seed(0)
            out = nn.functional.dropout(leaf, p)
            out.backward(x.to(device))
            results.append((out.detach().cpu(), leaf.grad.cpu()))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_gru_trains_close_to_cpu(sim: torch.device) -> None:
    """The fused cell adds biases in another order than the CPU's GRU."""
    torch.manual_seed(0)
    model, batch = models.gru(), models.tokens()
    on_cpu = models.train(model, batch, "cpu")
    on_sim = models.train(model, batch, "sim")
    for x, y in zip(on_cpu.steps, on_sim.steps, strict=True):
        torch.testing.assert_close(x.loss, y.loss, rtol=1e-5, atol=1e-6)
    for name, gradient in on_cpu.steps[0].gradients.items():
        torch.testing.assert_close(
            gradient, on_sim.steps[0].gradients[name], rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("name", models.MODELS)
def test_peaks_repeat_to_the_byte(name: str, sim: torch.device) -> None:
    make_model, make_batch = models.MODELS[name]
    torch.manual_seed(0)
    run = models.train(make_model(), make_batch(), "sim")
    # The first step makes the optimizer's state; from then on nothing changes.
    assert len(set(run.peaks[1:])) == 1
    assert run.peaks[1] > 0
    del run
    assert torch.accelerator.memory_allocated() == 0


def test_moving_keeps_parameters_and_ties(sim: torch.device) -> None:
    model = models.gpt2()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(sim)
    lm = model.model
    assert lm.lm_head.weight is lm.transformer.wte.weight
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert parameter.device == sim
    assert all(p.device == sim for p in optimizer.param_groups[0]["params"])
    model.cpu()
    assert lm.lm_head.weight is lm.transformer.wte.weight
    assert next(model.parameters()) is next(iter(parameters.values()))
    assert torch.accelerator.memory_allocated() == 0


def test_moving_keeps_hooks_and_attributes(sim: torch.device) -> None:
    layer = nn.Linear(3, 3)
    fired: list[str] = []
    layer.weight.no_weight_decay = True  # type: ignore[attr-defined]
    layer.weight.register_hook(lambda grad: fired.append("hook"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append("post"))
    for device in (sim, torch.device("cpu"), sim):
        layer.to(device)
        fired.clear()
        layer(torch.ones(1, 3, device=device)).sum().backward()
        assert fired == ["hook", "post"]
        assert layer.weight.no_weight_decay
        assert layer.weight.grad.device == device


def test_deepcopy_of_a_model_on_the_device(sim: torch.device) -> None:
    model = models.gpt2().to(sim)
    twin = copy.deepcopy(model)
    lm = twin.model
    assert lm.lm_head.weight is lm.transformer.wte.weight
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.data_ptr() != b.data_ptr()
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_grad_scaler(dtype: torch.dtype, sim: torch.device) -> None:
    torch.manual_seed(0)
    model = models.gpt2().to(sim)
    x, y = (t.to(sim) for t in models.tokens())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("sim", init_scale=128.0)
    seen: set[torch.dtype] = set()
    model.model.transformer.h[0].mlp.c_fc.register_forward_hook(
        lambda module, args, output: seen.add(output.dtype)
    )
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("sim", dtype=dtype):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert seen == {dtype}
    with torch.autocast("sim", dtype=dtype):
        recurrent = nn.LSTM(4, 4).to(sim)
        assert recurrent(torch.ones(2, 1, 4, device=sim))[0].dtype == dtype
    assert loss.dtype == torch.float32
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_thread_counts_do_not_matter(sim: torch.device) -> None:
    """Backward runs on another thread, which must split its sums as this one does."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    model, batch = models.gpt2(), models.tokens()
    try:
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            on_cpu = models.train(model, batch, "cpu", steps=2)
            on_sim = models.train(model, batch, "sim", steps=2)
            assert models.first_difference(on_cpu, on_sim) is None
    finally:
        torch.set_num_threads(threads)
