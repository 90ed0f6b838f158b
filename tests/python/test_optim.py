"""What training loops do with an optimizer, done with the 8-bit ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import memscale
from memscale.optim import Adam8bit, AdamW8bit, from_8bit, to_8bit
from optim_cases import assert_same, make_params, same_bits, set_gradients, train

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim", "one_thread")

TWINS = [(Adam8bit, torch.optim.Adam), (AdamW8bit, torch.optim.AdamW)]


@pytest.mark.parametrize(("ours", "theirs"), TWINS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_at_32_bits_as_torch(
    ours: Any, theirs: Any, maximize: bool, weight_decay: float
) -> None:
    options = {"lr": 0.01, "maximize": maximize, "weight_decay": weight_decay}
    a, b = ours(make_params(), bits=32, **options), theirs(make_params(), **options)
    assert isinstance(a, theirs)
    train(a, steps=40)
    train(b, steps=40)
    for p, q in zip(a.state, b.state, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flags", [{"foreach": True}, {"fused": True}])
def test_flags_that_change_nothing(flags: dict[str, bool]) -> None:
    plain, flagged = AdamW8bit(make_params()), AdamW8bit(make_params(), **flags)
    train(plain)
    train(flagged)
    assert_same(plain, flagged)


@pytest.mark.parametrize("flag", ["amsgrad", "capturable", "differentiable"])
def test_flags_that_need_32_bits(flag: str) -> None:
    message = f"{flag} must be False with bits=8, got True"
    with pytest.raises(memscale.InputError, match=message):
        AdamW8bit(make_params(), **{flag: True})
    optimizer = AdamW8bit(make_params())
    with pytest.raises(memscale.InputError, match=message):
        optimizer.add_param_group({"params": make_params(), flag: True})
    assert len(optimizer.param_groups) == 1


def test_amsgrad_at_32_bits_is_torchs() -> None:
    ours = AdamW8bit(make_params(), amsgrad=True, bits=32)
    theirs = torch.optim.AdamW(make_params(), amsgrad=True)
    train(ours)
    train(theirs)
    assert_same(ours, theirs)


@pytest.mark.parametrize(("ours", "theirs"), TWINS)
def test_defaults_are_torchs(ours: Any, theirs: Any) -> None:
    own = {"bits": 8, "min_8bit_size": 4096, "stochastic_rounding": False}
    a, b = ours(make_params()).defaults, theirs(make_params()).defaults
    assert a == {**b, **own}
    assert (
        ours(make_params(), 1e-3, (0.9, 0.9), 1e-8, 0.5).defaults["weight_decay"]
        == theirs(make_params(), 1e-3, (0.9, 0.9), 1e-8, 0.5).defaults["weight_decay"]
    )


def test_bad_options() -> None:
    with pytest.raises(memscale.InputError, match="bits must be 8 or 32, got 4"):
        AdamW8bit(make_params(), bits=4)
    with pytest.raises(memscale.InputError, match="min_8bit_size must be at least 0"):
        AdamW8bit(make_params(), min_8bit_size=-1)
    optimizer = AdamW8bit(make_params())
    with pytest.raises(memscale.InputError, match="bits must be 8 or 32, got 16"):
        optimizer.set_bits(optimizer.param_groups[0]["params"][0], 16)
    with pytest.raises(memscale.InputError, match="param must be one of the optim"):
        optimizer.set_bits(make_params()[0], 32)


def test_groups_added_later() -> None:
    optimizer = AdamW8bit(make_params(), min_8bit_size=5000)
    train(optimizer)
    late = make_params()
    optimizer.add_param_group({"params": late, "lr": 0.1, "bits": 32})
    train(optimizer)
    first = optimizer.param_groups[0]["params"]
    assert [optimizer.bits_of(p) for p in first] == [8, 32, 32]
    assert [optimizer.bits_of(p) for p in late] == [32, 32, 32]
    assert optimizer.param_groups[1]["min_8bit_size"] == 5000
    assert optimizer.state[late[0]]["step"] == 4
    assert optimizer.state[first[0]]["step"] == 8


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers(when: str) -> None:
    """Attached to torch's before it is converted, or to ours."""

    def run(optimizer: Any, convert: Callable[[Any], Any]) -> list[float]:
        if when == "after":
            convert(optimizer)
        with warnings.catch_warnings():
            # "lr_scheduler.step() before optimizer.step()", if it missed the steps.
            warnings.simplefilter("error")
            scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
            if when == "before":
                train(optimizer, steps=2, after=scheduler.step)
                assert convert(optimizer) is None
            train(optimizer, 2, 4, scheduler.step)
        return [scheduler.get_last_lr()[0], optimizer.param_groups[0]["betas"][0]]

    ours, theirs = (torch.optim.AdamW(make_params()) for _ in range(2))
    assert run(ours, to_8bit) == run(theirs, lambda _: None)
    assert isinstance(ours, AdamW8bit)
    for p, q in zip(ours.state, theirs.state, strict=True):
        torch.testing.assert_close(p, q, atol=0.02, rtol=0)  # of a way of 0.1
        assert (p - q).abs().mean() < 1e-3


def test_schedulers_of_every_group() -> None:
    optimizer = AdamW8bit([{"params": make_params()}, {"params": make_params()}])
    scheduler = LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1.0])
    train(optimizer, steps=2, after=scheduler.step)
    assert [group["lr"] for group in optimizer.param_groups] == [0.00025, 0.001]


def test_tensor_learning_rate() -> None:
    numbers = AdamW8bit(make_params(), lr=0.02)
    tensors = AdamW8bit(make_params(), lr=torch.tensor(0.02, dtype=torch.float64))
    train(numbers)
    train(tensors)
    assert_same(numbers, tensors)


def test_clipping_and_accumulation() -> None:
    """Of the gradients as they are: the optimizer never holds or changes them."""
    model = nn.Linear(100, 100)
    optimizer = AdamW8bit(model.parameters())
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        assert (model.weight.grad is None) == set_to_none
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(4, 100)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        gradient = model.weight.grad.clone()
        optimizer.step()
        assert torch.equal(model.weight.grad, gradient)
    assert optimizer.state[model.weight]["step"] == 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_grad_scaler(fused: bool, device: str) -> None:
    """Unscaled by the scaler or by the step; skipped where a gradient is inf."""
    scaled, plain = (
        AdamW8bit(make_params(device=device), fused=fused) for _ in range(2)
    )
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    assert getattr(scaled, "_step_supports_amp_scaling", False) == fused
    for seed in range(3):
        params, others = (o.param_groups[0]["params"] for o in (scaled, plain))
        set_gradients(params, seed)
        set_gradients(others, seed)
        scaler.scale(torch.zeros((), device=device))
        for p in params:
            p.grad *= 1024
        if seed == 1:
            params[0].grad[0, 0] = torch.inf
        else:
            plain.step()
        scaler.step(scaled)
        scaler.update(1024.0)
        assert_same(scaled, plain)
    assert scaled.state[params[0]]["step"] == 2


def test_closures_and_hooks() -> None:
    optimizer = AdamW8bit(make_params())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    x = torch.ones(40)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (x @ optimizer.param_groups[0]["params"][0]).sum()
        loss.backward()
        seen.append("closure")
        return loss

    assert isinstance(optimizer.step(closure), torch.Tensor)
    assert seen == ["pre", "closure", "post"]
    assert len(optimizer.state) == 1  # the others have no gradient


def test_frozen_and_thawed() -> None:
    optimizer = AdamW8bit(make_params())
    first, second, third = optimizer.param_groups[0]["params"]
    before = third.detach().clone()
    third.requires_grad_(False)
    for seed in range(2):
        set_gradients([first, second], seed)
        optimizer.step()
    assert third not in optimizer.state
    assert torch.equal(third, before)
    third.requires_grad_(True)
    train(optimizer)
    assert optimizer.state[third]["step"] == 4
    assert optimizer.state[first]["step"] == 6
    assert not torch.equal(third, before)


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(80, 64)
            self.head = nn.Linear(64, 80, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    model = Tied()
    optimizer = AdamW8bit(model.parameters())
    for _ in range(2):
        model(torch.arange(10)).logsumexp(-1).sum().backward()
        optimizer.step()
    assert len(optimizer.state) == 1
    assert optimizer.state[model.head.weight]["step"] == 2
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("bits", [8, 32])
def test_empty_and_scalar_parameters(bits: int) -> None:
    sizes = ((0, 5), (), (1,))
    optimizer = AdamW8bit(make_params(sizes=sizes), bits=bits, min_8bit_size=0)
    train(optimizer)
    loaded = AdamW8bit(make_params(sizes=sizes), bits=bits, min_8bit_size=0)
    loaded.load_state_dict(optimizer.state_dict())
    assert all(state["step"] == 4 for state in loaded.state.values())


def strided(kind: str, device: str) -> nn.Parameter:
    values = make_params(sizes=((6, 8, 12, 10),), device=device)[0].detach()
    if kind == "channels_last":
        values = values.to(memory_format=torch.channels_last)
    elif kind == "transposed":
        values = values.transpose(0, 3)
    elif kind == "view":  # dense, of a larger storage
        values = torch.cat([values, values])[6:]
    elif kind == "gaps":
        values = torch.cat([values, values], 1)[:, ::2]
    return nn.Parameter(values)


@pytest.mark.parametrize("kind", ["channels_last", "transposed", "view", "gaps"])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_layouts(kind: str, bits: int, device: str) -> None:
    p = strided(kind, device)
    contiguous = nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))
    ours, reference = AdamW8bit([p], bits=bits), torch.optim.AdamW([contiguous])
    stride = p.stride()
    train(ours)
    train(reference)
    assert p.stride() == stride
    tolerance = 2e-3 if bits == 8 else 1e-7
    torch.testing.assert_close(p, contiguous, atol=tolerance, rtol=1e-6)


@pytest.mark.parametrize("kind", ["channels_last", "transposed", "view", "gaps"])
def test_gradients_of_another_layout(kind: str) -> None:
    one, two = (AdamW8bit([strided(kind, "cpu")]) for _ in range(2))
    train(one)
    for seed in range(4):
        (p,) = two.param_groups[0]["params"]
        set_gradients([p], seed)
        p.grad = p.grad.clone(memory_format=torch.contiguous_format)
        two.step()
    assert_same(one, two)


def conv(layout: torch.memory_format, device: str, kernel: int = 3) -> nn.Parameter:
    (p,) = make_params(sizes=((16, 32, kernel, kernel),), device=device)
    return nn.Parameter(p.detach().to(memory_format=layout))


def steep_gradients(p: torch.Tensor, seed: int) -> None:
    """Of each element its own magnitude, so that a moment in the wrong place shows."""
    set_gradients([p], seed)
    place = torch.arange(p.numel()).view(p.shape) * 0.618 % 1
    p.grad *= (place * 3).exp().to(p.device)


def relaid(bits: int, device: str, save: bool = False) -> tuple[Any, Any, Any]:
    """Five steps, another layout, five more; the same with that layout from the start
    and with torch's."""
    changed = AdamW8bit([conv(torch.contiguous_format, device)], lr=0.01, bits=bits)
    steady = AdamW8bit([conv(torch.channels_last, device)], lr=0.01, bits=bits)
    theirs = torch.optim.AdamW([conv(torch.contiguous_format, "cpu")], lr=0.01)
    for seed in range(10):
        if seed == 5:
            (p,) = changed.param_groups[0]["params"]
            p.data = p.data.to(memory_format=torch.channels_last)
            if save:
                saved = changed.state_dict()
                changed = AdamW8bit([p], lr=0.01, bits=bits)
                changed.load_state_dict(saved)
        for optimizer in (changed, steady, theirs):
            steep_gradients(*optimizer.param_groups[0]["params"], seed)
            optimizer.step()
    return changed, steady, theirs


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_layout_that_changes(device: str, save: bool) -> None:
    """Blocks are of other elements before and after, so the bits are not the same: it
    is as far from torch's as the steady run is (0.0006 of a way of 0.1; 0.015 with the
    moments in the wrong places), and from that by no more than both errors."""
    changed, steady, theirs = relaid(8, device, save)
    (p,), (q,), (r,) = (o.param_groups[0]["params"] for o in (changed, steady, theirs))
    error, usual = ((x.cpu() - r).abs() for x in (p, q))
    assert error.mean() <= 1.2 * usual.mean() < 1e-3
    assert error.max() <= 1.5 * usual.max()
    assert (p - q).abs().max().cpu() <= error.max() + usual.max()
    a, b = (o.state_dict()["state"][0] for o in (changed, steady))
    for name in ("exp_avg", "exp_avg_sq"):
        # 0.71 % a step and run of the first moment, decaying by 0.9: 9.3 % in 10 steps.
        atol = 0.1 * b[name].abs().max().item()
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0)
        assert changed.state[p][f"{name}_codes"].stride() == p.stride()


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_layout_that_changes_at_32_bits(device: str, save: bool) -> None:
    changed, steady, _ = relaid(32, device, save)
    assert_same(changed, steady)


@pytest.mark.parametrize("bits", [8, 32])
def test_a_layout_that_changes_in_name_only(bits: int) -> None:
    """The strides of a 1x1 convolution's weight differ, and their order does not."""
    changed, steady = (
        AdamW8bit([conv(torch.contiguous_format, "cpu", 1)], bits=bits, min_8bit_size=0)
        for _ in range(2)
    )
    train(changed)
    (p,) = changed.param_groups[0]["params"]
    p.data = p.data.to(memory_format=torch.channels_last)
    train(changed, 4)
    train(steady, steps=8)
    assert_same(changed, steady)


@pytest.mark.parametrize("way", ["deepcopy", "set_bits", "from_8bit"])
def test_what_follows_a_changed_layout_keeps_the_moments_in_place(way: str) -> None:
    ours = AdamW8bit([conv(torch.contiguous_format, "cpu")])
    (p,) = ours.param_groups[0]["params"]
    for seed in range(3):
        steep_gradients(p, seed)
        ours.step()
    expected = ours.state_dict()["state"][0]["exp_avg"]
    p.data = p.data.to(memory_format=torch.channels_last)
    assert torch.equal(ours.state_dict()["state"][0]["exp_avg"], expected)
    if way == "deepcopy":
        ours = copy.deepcopy(ours)
        (p,) = ours.param_groups[0]["params"]
        found = ours.state_dict()["state"][0]["exp_avg"]
    elif way == "set_bits":
        ours.set_bits(p, 32)
        found = ours.state[p]["exp_avg"]
    else:
        from_8bit(ours)
        found = ours.state[p]["exp_avg"]
    assert torch.equal(found, expected)
    steep_gradients(p, 3)
    ours.step()


def test_a_shape_that_changes_is_refused() -> None:
    ours = AdamW8bit(make_params(sizes=((80, 64),)))
    train(ours)
    (p,) = ours.param_groups[0]["params"]
    p.data = p.data.view(64, 80)
    message = r"param must keep its shape, \[80, 64\], got \[64, 80\]"
    with pytest.raises(memscale.InputError, match=message):
        train(ours)


def test_types_that_torch_steps() -> None:
    """float64 and complex parameters, beside ours."""

    def make() -> list[nn.Parameter]:
        return [
            *make_params(torch.float64, ((5000,),)),
            nn.Parameter(torch.complex(*make_params(sizes=((9,), (9,)))).detach()),
            *make_params(sizes=((5000,),)),
        ]

    ours, theirs = AdamW8bit(make()), torch.optim.AdamW(make())
    train(ours)
    train(theirs)
    a, b = ours.param_groups[0]["params"], theirs.param_groups[0]["params"]
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert "exp_avg_codes" in ours.state[a[2]]
    loaded = AdamW8bit(make())
    loaded.load_state_dict(copy.deepcopy(ours.state_dict()))
    for p, q in zip(a, loaded.param_groups[0]["params"], strict=True):
        assert all(same_bits(v, loaded.state[q][k]) for k, v in ours.state[p].items())


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(100, 64, sparse=True)
    optimizer = AdamW8bit(embedding.parameters())
    embedding(torch.arange(3)).sum().backward()
    with pytest.raises(memscale.InputError, match=r"grad must be dense, got torch.sp"):
        optimizer.step()


def test_stochastic_rounding() -> None:
    """Steps of less than half an ulp are lost to nearest, and kept on average."""

    def run(**options: Any) -> torch.Tensor:
        p = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
        optimizer = AdamW8bit([p], lr=1e-4, weight_decay=0.0, **options)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return p.detach()

    assert torch.equal(run(), torch.ones(64, 128, dtype=torch.bfloat16))
    rounded = run(stochastic_rounding=True)
    assert rounded.float().mean().item() == pytest.approx(1 - 20e-4, abs=2e-4)
    torch.manual_seed(77)  # no draws of torch's
    assert torch.equal(rounded, run(stochastic_rounding=True))


def test_stochastic_rounding_differs_by_parameter() -> None:
    params = [nn.Parameter(torch.ones(8192, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = AdamW8bit(params, stochastic_rounding=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(*params)


def test_autograd_sees_the_step() -> None:
    p = make_params()[0]
    loss = p.square().sum()
    p.grad = torch.ones_like(p)
    AdamW8bit([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_beside_wrap() -> None:
    """A wrapped model's training is the unwrapped one's, with this optimizer too."""
    models = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
    models.append(copy.deepcopy(models[0]))
    memscale.wrap(models[0], memscale.Config(force_optimize=True, enable_logging=False))
    optimizers = [AdamW8bit(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for seed in range(4):
            torch.manual_seed(seed)
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*optimizers)
    memscale.detach(models[0])


@pytest.mark.parametrize("scheduled", [False, True])
def test_compiled_steps(scheduled: bool) -> None:
    """torch.compile must not take the one call that it traces for all of them."""
    plain, compiled = (torch.optim.AdamW(make_params()) for _ in range(2))
    for optimizer in (plain, compiled):
        if scheduled:
            LambdaLR(optimizer, lambda n: 1.0)
        to_8bit(optimizer)
    step = torch.compile(lambda: compiled.step(), backend="eager")
    for seed in range(4):
        set_gradients(compiled.param_groups[0]["params"], seed)
        step()
    train(plain)
    assert_same(plain, compiled)


def test_a_flag_set_later_is_refused() -> None:
    optimizer = AdamW8bit(make_params())
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(memscale.InputError, match="capturable must be False"):
        train(optimizer)
