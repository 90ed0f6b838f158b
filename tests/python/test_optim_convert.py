"""A live optimizer of torch made 8-bit in place, and back."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import memscale
from memscale.optim import Adam8bit, AdamW8bit, bitsandbytes, from_8bit, to_8bit
from memscale.optim import state as optim_state
from optim_cases import all_params, assert_same, make_params, set_gradients, train

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim", "one_thread")

PAIRS = [(torch.optim.Adam, Adam8bit), (torch.optim.AdamW, AdamW8bit)]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_there_and_back(theirs: Any, ours: Any, dtype: Any, device: str) -> None:
    """The object is the same, and what comes back is as one never converted."""
    optimizer, plain = (
        theirs(make_params(dtype, device=device), lr=0.01) for _ in range(2)
    )
    train(optimizer)
    train(plain)
    attributes = optimizer.__dict__.keys()
    assert to_8bit(optimizer) is None
    assert type(optimizer) is ours
    assert to_8bit(optimizer) is None  # again is nothing
    first = all_params(optimizer)[0]
    assert optimizer.state[first]["exp_avg_codes"].device == first.device
    assert optimizer.state[first]["step"] == 4
    train(optimizer, 4)
    train(plain, 4)
    from_8bit(optimizer)
    assert type(optimizer) is theirs
    assert optimizer.__dict__.keys() == attributes == plain.__dict__.keys()
    assert optimizer.defaults == plain.defaults
    assert [g.keys() for g in optimizer.param_groups] == [
        g.keys() for g in plain.param_groups
    ]
    for p, q in zip(all_params(optimizer), all_params(plain), strict=True):
        a, b = optimizer.state[p], plain.state[q]
        assert a.keys() == b.keys()
        for key, value in b.items():
            assert a[key].dtype == value.dtype
            assert a[key].device == value.device
            assert a[key].stride() == value.stride()
            atol = 0.02 * value.abs().max().item()
            torch.testing.assert_close(a[key], value, atol=atol, rtol=0.01)
    train(optimizer, 8)


HOOKS = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
import memscale.optim

seen = []
p = torch.nn.Parameter(torch.ones(5000))
p.grad = torch.ones(5000)
optimizer = torch.optim.{kind}([p])
optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
optimizer.register_step_post_hook(lambda *_: seen.append("post"))
register_optimizer_step_post_hook(lambda *_: seen.append("any"))

def step(name):
    with torch.autograd.profiler.profile() as profile:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    names = [e.name for e in profile.function_events if e.name.startswith("Optim")]
    assert names == [f"Optimizer.{{f}}#{{name}}.{{f}}" for f in ("step", "zero_grad")]
    assert seen == ["pre", "post", "any"], seen
    seen.clear()

memscale.optim.to_8bit(optimizer)
step("{kind}8bit")
memscale.optim.from_8bit(optimizer)
step("{kind}")
"""


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_step_hooks_where_none_of_ours_was_constructed(kind: str) -> None:
    """torch prepares a class's step for them when an object is made: in a process of
    its own."""
    command = [sys.executable, "-c", HOOKS.format(kind=kind)]
    subprocess.run(command, check=True, timeout=120)


def test_without_state_only_the_class_changes() -> None:
    optimizer = torch.optim.AdamW(make_params())
    assert to_8bit(optimizer, min_8bit_size=5000, stochastic_rounding=True) is None
    assert [optimizer.bits_of(p) for p in all_params(optimizer)] == [8, 32, 32]
    reference = AdamW8bit(make_params(), min_8bit_size=5000, stochastic_rounding=True)
    assert optimizer.defaults == reference.defaults
    train(optimizer)
    train(reference)
    assert_same(optimizer, reference)
    optimizer.add_param_group({"params": make_params()})
    from_8bit(optimizer)
    train(optimizer)


def test_fused_keeps_its_step_on_the_device() -> None:
    params = make_params(device="sim")
    optimizer = torch.optim.AdamW(params, fused=True)
    for p in params:  # as torch's fused step leaves it; the device has no such kernel
        optimizer.state[p] = {
            "step": torch.tensor(3.0, device="sim"),
            "exp_avg": torch.ones_like(p),
            "exp_avg_sq": torch.ones_like(p),
        }
    assert to_8bit(optimizer) is None
    train(optimizer, steps=1)
    assert optimizer.state[params[0]]["step"].device.type == "cpu"
    from_8bit(optimizer)
    assert optimizer.state[params[0]]["step"].device.type == "sim"
    assert optimizer.state[params[0]]["step"].item() == 4


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.optim.SGD(make_params()), "SGD is not torch.optim.Adam or"),
        (lambda: torch.optim.NAdam(make_params()), "NAdam is not"),
        (lambda: type("Mine", (torch.optim.AdamW,), {})(make_params()), "Mine is not"),
        (
            lambda: torch.optim.AdamW(make_params(), amsgrad=True),
            "AdamW cannot be 8-bit: amsgrad must be False with bits=8, got True",
        ),
    ],
)
def test_left_alone_with_a_reason(make: Any, reason: str) -> None:
    optimizer = make()
    kind, groups = type(optimizer), [g.keys() for g in optimizer.param_groups]
    assert to_8bit(optimizer).startswith(reason)
    assert type(optimizer) is kind
    assert [g.keys() for g in optimizer.param_groups] == groups
    if type(optimizer) is not torch.optim.AdamW:
        with pytest.raises(memscale.InputError, match="optimizer must be an Adam8bit"):
            from_8bit(optimizer)


def test_a_group_with_bits_of_its_own() -> None:
    optimizer = torch.optim.AdamW(
        [{"params": make_params()}, {"params": make_params(), "bits": 32}]
    )
    assert to_8bit(optimizer) is None
    assert [optimizer.bits_of(p) for p in all_params(optimizer)] == [8, 32, 8] + [
        32
    ] * 3


@pytest.mark.parametrize("copied", [False, True])
def test_a_group_has_its_own_options_back(copied: bool) -> None:
    own = {"bits": 32, "min_8bit_size": 10}
    optimizer = torch.optim.AdamW(
        [{"params": make_params()}, {"params": make_params(), **own}]
    )
    train(optimizer)
    before = [{**g, "params": None} for g in optimizer.param_groups]
    assert [g["foreach"] for g in before] == [g["fused"] for g in before] == [None] * 2
    assert to_8bit(optimizer) is None
    if copied:
        optimizer = copy.deepcopy(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, 4)
    optimizer.add_param_group({"params": make_params(), "bits": 32})
    from_8bit(optimizer)
    after = [{**g, "params": None} for g in optimizer.param_groups]
    assert after[:2] == before
    assert after[2].keys() == before[0].keys()
    train(optimizer, 8)


def test_overrides_come_with_a_loaded_group() -> None:
    """torch's load_state_dict keeps what it does not know in the group."""
    ours = AdamW8bit(make_params())
    train(ours)
    ours.set_bits(all_params(ours)[0], 32)
    optimizer = torch.optim.AdamW(make_params())
    optimizer.load_state_dict(ours.state_dict())
    assert to_8bit(optimizer) is None
    assert [optimizer.bits_of(p) for p in all_params(optimizer)] == [32, 32, 8]
    assert "exp_avg" in optimizer.state[all_params(optimizer)[0]]
    assert "bits_of_params" not in optimizer.param_groups[0]
    from_8bit(optimizer)
    assert "bits_of_params" not in optimizer.param_groups[0]


def failing_after(calls: int, function: Any) -> Any:
    count = [0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] > calls:
            raise torch.OutOfMemoryError("stand-in")
        return function(*args, **kwargs)

    return fails


@pytest.mark.parametrize("calls", [0, 1])
def test_to_8bit_is_never_half(monkeypatch: Any, calls: int) -> None:
    optimizer, plain = (torch.optim.AdamW(make_params()) for _ in range(2))
    train(optimizer)
    train(plain)
    fails = failing_after(calls, optim_state.to_8bit)
    monkeypatch.setattr(optim_state, "to_8bit", fails)
    with pytest.raises(torch.OutOfMemoryError):
        to_8bit(optimizer)
    assert type(optimizer) is torch.optim.AdamW
    assert "bits" not in optimizer.defaults
    if calls == 0:  # where memory does run out: the largest is first
        assert_same(optimizer, plain)
    for p, q in zip(all_params(optimizer), all_params(plain), strict=True):
        a, b = optimizer.state[p], plain.state[q]
        assert a.keys() == b.keys()
        atol = 0.02 * b["exp_avg"].abs().max().item()
        torch.testing.assert_close(a["exp_avg"], b["exp_avg"], atol=atol, rtol=0)
    train(optimizer, 4)


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_8bit_is_never_half(monkeypatch: Any, calls: int, dtype: Any) -> None:
    optimizer, plain = (AdamW8bit(make_params(dtype)) for _ in range(2))
    train(optimizer)
    train(plain)
    fails = failing_after(calls, optim_state.as_torch)
    monkeypatch.setattr(optim_state, "as_torch", fails)
    with pytest.raises(torch.OutOfMemoryError):
        from_8bit(optimizer)
    assert_same(optimizer, plain)
    train(optimizer, 4)
    train(plain, 4)
    assert_same(optimizer, plain)


def test_conversion_holds_one_parameter_twice(sim: torch.device) -> None:
    optimizer = torch.optim.AdamW(make_params(sizes=((512, 512),) * 8, device=sim))
    train(optimizer, steps=1)
    with memscale.memory.track(sim) as memory:
        to_8bit(optimizer)
    freed = memory.before - memory.current
    assert freed > 5.9 * 8 * 512 * 512
    assert memory.peak - memory.before < 2.1 * 512 * 512 + (8 << 20)
    with memscale.memory.track(sim) as memory:
        from_8bit(optimizer)
    assert memory.peak - memory.current < 2.1 * 512 * 512 + (8 << 20)


def test_the_largest_goes_first(monkeypatch: Any) -> None:
    """What it frees is enough for the rest: memory runs out at once or not at all."""
    optimizer = torch.optim.AdamW(make_params(sizes=((5000,), (90, 90), (4096,))))
    train(optimizer)
    sizes = []
    convert = optim_state.to_8bit

    def noting(p: Tensor, state: Any) -> Any:
        sizes.append(p.numel())
        return convert(p, state)

    monkeypatch.setattr(optim_state, "to_8bit", noting)
    to_8bit(optimizer)
    assert sizes == [8100, 5000, 4096]


@pytest.fixture
def stand_in(monkeypatch: Any) -> Iterator[list[dict[str, Any]]]:
    """bitsandbytes' function in plain torch, asked for on the CPU; its calls."""
    calls: list[dict[str, Any]] = []

    def update(
        optimizer_name: str, g: Tensor, p: Tensor, state1: Tensor, state2: Tensor,
        beta1: float,
        beta2: float, beta3: float, alpha: float, eps: float, step: int, lr: float,
        qmap1: Tensor, qmap2: Tensor, absmax1: Tensor, absmax2: Tensor,
        weight_decay: float = 0.0, gnorm_scale: float = 1.0, skip_zeros: bool = False,
    ) -> None:  # fmt: skip
        m, v = state1, state2
        assert g.shape == p.shape == m.shape == v.shape
        calls.append({"name": optimizer_name, "step": step, "scale": gnorm_scale})
        wide = []
        for codes, qmap, absmax in ((m, qmap1, absmax1), (v, qmap2, absmax2)):
            scale = absmax.repeat_interleave(256)[: codes.numel()]
            wide.append((qmap[codes.flatten().long()] * scale).view_as(p))
        g = g.float() * gnorm_scale
        wide[0].lerp_(g, 1 - beta1)
        wide[1].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denom = (wide[1] / (1 - beta2**step)).sqrt() + eps
        p.mul_(1 - lr * weight_decay).sub_(lr / (1 - beta1**step) * wide[0] / denom)
        for new, codes, absmax, sign in (
            (wide[0], m, absmax1, True),
            (wide[1], v, absmax2, False),
        ):
            torch.ops.memscale.quantise_(codes, absmax, new, sign)

    functional = types.ModuleType("bitsandbytes.functional")
    functional.optimizer_update_8bit_blockwise = update
    package = types.ModuleType("bitsandbytes")
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)
    monkeypatch.setattr(bitsandbytes, "DEVICES", frozenset({"cpu"}))
    bitsandbytes.find.cache_clear()
    yield calls
    bitsandbytes.find.cache_clear()


def test_bitsandbytes_steps_our_state(stand_in: list[dict[str, Any]]) -> None:
    """In turn with our own kernels, on a converted optimizer."""
    served, own = (torch.optim.AdamW(make_params(), lr=0.01) for _ in range(2))
    for optimizer in (served, own):
        train(optimizer)
        to_8bit(optimizer)
    train(served, 4, 2)
    assert [call["step"] for call in stand_in] == [5, 5, 6, 6]  # two of three are 8-bit
    before = len(stand_in)
    own.param_groups[0]["stochastic_rounding"] = True  # which only we have
    train(own, 4, 2)
    assert len(stand_in) == before
    for p, q in zip(all_params(served), all_params(own), strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=0)  # of a way of 0.02
    served.param_groups[0]["maximize"] = True
    train(served, 6)
    assert len(stand_in) == before


def test_bitsandbytes_under_a_grad_scaler(stand_in: list[dict[str, Any]]) -> None:
    optimizer = AdamW8bit(make_params(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    params = all_params(optimizer)
    set_gradients(params, 0)
    scaler.step(optimizer)
    assert stand_in[0]["scale"] == 0.25
    scaler.update(4.0)
    params[0].grad[0, 0] = torch.inf
    before = len(stand_in)
    scaler.step(optimizer)
    assert len(stand_in) == before


@pytest.mark.parametrize(
    "update",
    [
        lambda optimizer_name, g, p, state1, state2, beta1, beta2, eps, step: None,
        lambda *args: None,
        print,
        None,
    ],
)
def test_another_bitsandbytes(stand_in: list[Any], update: Any) -> None:
    """Older ones have no beta3 and alpha, for one: our own kernel steps."""
    functional = sys.modules["bitsandbytes.functional"]
    functional.optimizer_update_8bit_blockwise = update
    train(AdamW8bit(make_params()))
    assert bitsandbytes.find() is None
    assert not stand_in


def test_bitsandbytes_is_for_cuda() -> None:
    assert frozenset({"cuda"}) == bitsandbytes.DEVICES
