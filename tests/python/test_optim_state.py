"""state_dict in both directions, copies and pickles of the 8-bit optimizers."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch

import memscale
from memscale.optim import Adam8bit, AdamW8bit
from memscale.optim import state as optim_state
from optim_cases import all_params, assert_same, make_params, train

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim", "one_thread")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def twin_of(optimizer: Any, **options: Any) -> Any:
    """A new optimizer over copies of the parameters as they are now."""
    params = [torch.nn.Parameter(p.detach().clone()) for p in all_params(optimizer)]
    return type(optimizer)(params, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("stochastic_rounding", [False, True])
def test_saved_and_loaded_goes_on_bit_equal(
    dtype: torch.dtype, device: str, stochastic_rounding: bool
) -> None:
    options = {"lr": 0.01, "stochastic_rounding": stochastic_rounding}
    ours = AdamW8bit(make_params(dtype, device=device), **options)
    train(ours)
    loaded = twin_of(ours)
    loaded.load_state_dict(through_a_file(ours.state_dict()))
    assert_same(ours, loaded)
    assert loaded.param_groups[0]["lr"] == 0.01
    train(ours, 4)
    train(loaded, 4)
    assert_same(ours, loaded)


def test_blocks_that_are_hard_to_bring_back() -> None:
    """The largest magnitude negative, values that are denormal, NaN, zero."""
    p = torch.nn.Parameter(torch.zeros(6 * 1024))
    ours = AdamW8bit([p])
    gradient = torch.randn(6, 1024, generator=torch.Generator().manual_seed(0))
    gradient[0] = -gradient[0].abs()
    gradient[1] *= 1e-37
    gradient[2] *= 1e-18  # whose squares are
    gradient[3, 5] = torch.nan
    gradient[4] = 0
    gradient[5] *= 1e18
    for _ in range(2):
        p.grad = gradient.flatten()
        ours.step()
    assert ours.state[p]["exp_avg_absmax"].isnan().sum() == 1
    loaded = twin_of(ours)
    loaded.load_state_dict(through_a_file(ours.state_dict()))
    assert_same(ours, loaded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_loads_ours(dtype: torch.dtype) -> None:
    ours = AdamW8bit(make_params(dtype), lr=0.01)
    train(ours)
    theirs = torch.optim.AdamW(
        [torch.nn.Parameter(p.detach().clone()) for p in all_params(ours)]
    )
    theirs.load_state_dict(through_a_file(ours.state_dict()))
    for p in all_params(theirs):
        state = theirs.state[p]
        assert state["step"] == 4
        assert state["exp_avg"].shape == p.shape
        assert state["exp_avg"].dtype == dtype
    if dtype == torch.float16:
        return  # torch's squares of small gradients are 0 in it, and its steps inf
    train(ours, 4)
    train(theirs, 4)
    for p, q in zip(all_params(ours), all_params(theirs), strict=True):
        torch.testing.assert_close(p, q, atol=0.01, rtol=0.01)  # of a way of 0.04


@pytest.mark.parametrize("fused", [False, True])
def test_ours_loads_torchs(fused: bool) -> None:
    theirs = torch.optim.AdamW(make_params(), lr=0.01, fused=fused)
    train(theirs)
    ours = AdamW8bit(
        [torch.nn.Parameter(p.detach().clone()) for p in all_params(theirs)]
    )
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    saved = ours.state_dict()["state"]
    for i, p in enumerate(all_params(theirs)):
        reference = theirs.state[p]
        largest = reference["exp_avg"].abs().max()
        error = (saved[i]["exp_avg"] - reference["exp_avg"]).abs().max()
        assert error <= 0.01 * largest
        assert saved[i]["step"] == 4
    assert ours.bits_of(all_params(ours)[0]) == 8
    train(ours, 4)


@pytest.mark.parametrize("flag", ["capturable", "fused", "foreach"])
def test_what_torch_steps_is_loaded_as_by_torch(sim: torch.device, flag: str) -> None:
    """Type and place of everything, step too; and nothing of the saved one is held."""
    saved = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.ones(50),
        "exp_avg_sq": torch.ones(50),
        "max_exp_avg_sq": torch.ones(50),
    }
    options = {flag: True, "amsgrad": True}
    theirs = torch.optim.AdamW(make_params(sizes=((50,),), device=sim), **options)
    ours = AdamW8bit(make_params(sizes=((50,),), device=sim), bits=32, **options)
    groups = theirs.state_dict()["param_groups"]
    for optimizer in (theirs, ours):
        optimizer.load_state_dict({"state": {0: saved}, "param_groups": groups})
    a, b = (o.state[all_params(o)[0]] for o in (theirs, ours))
    assert a["step"].device.type == ("cpu" if flag == "foreach" else "sim")
    for key, value in a.items():
        assert (b[key].device, b[key].dtype) == (value.device, value.dtype), key
        assert b[key] is not saved[key]


def test_an_absmax_that_no_longer_holds() -> None:
    """torch's Adam carries keys that it does not know, and steps past them."""
    ours = AdamW8bit(make_params())
    train(ours)
    theirs = torch.optim.AdamW(make_params())
    theirs.load_state_dict(ours.state_dict())
    set_large = 50.0
    for p in all_params(theirs):
        p.grad = torch.full_like(p, set_large)
    theirs.step()
    saved = theirs.state_dict()
    assert "exp_avg_absmax" in saved["state"][0]
    again = AdamW8bit(make_params())
    again.load_state_dict(saved)
    back = again.state_dict()["state"][0]["exp_avg"]
    torch.testing.assert_close(back, saved["state"][0]["exp_avg"], rtol=0.02, atol=0)


def test_a_state_dict_is_a_snapshot_on_the_host() -> None:
    device = torch.device("sim")
    ours = AdamW8bit(make_params(device=device))
    train(ours)
    with memscale.memory.track(device) as memory:
        saved = ours.state_dict()
    assert memory.peak == memory.before
    reference = copy.deepcopy(saved)
    train(ours, 4)
    for i, entry in saved["state"].items():
        for key, value in entry.items():
            assert value.device.type == "cpu"
            assert torch.equal(value, reference["state"][i][key])


def test_saving_leaves_the_live_state_in_place(monkeypatch: Any) -> None:
    """Another thread may step, or save, in the meantime."""
    ours = AdamW8bit(make_params())
    train(ours)
    live, seen, saved = ours.state, [], []
    plain = optim_state.as_saved

    def slow(*args: Any) -> Any:
        seen.append(ours.state is live and len(live) == 3)
        return plain(*args)

    monkeypatch.setattr(optim_state, "as_saved", slow)
    ours.register_state_dict_post_hook(lambda *_: seen.append(ours.state is live))
    threads = [
        threading.Thread(target=lambda: saved.append(ours.state_dict()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 16
    assert len(saved) == 4
    for each in saved:
        assert each["state"].keys() == {0, 1, 2}
        assert all("exp_avg_codes" not in state for state in each["state"].values())
    assert not [k for k, v in vars(ours).items() if "hooks" in k and len(v) > 1]


def test_loading_brings_bytes_to_the_device_not_floats() -> None:
    ours = AdamW8bit(make_params(sizes=((1000, 1000),), device="sim"))
    train(ours, steps=1)
    saved = ours.state_dict()
    loaded = AdamW8bit(make_params(sizes=((1000, 1000),), device="sim"))
    with memscale.memory.track("sim") as memory:
        loaded.load_state_dict(saved)
    assert memory.peak - memory.before < 2.1e6


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_loading_into_another_layout(layout: torch.memory_format) -> None:
    (p,) = make_params(sizes=((8, 16, 8, 8),))
    ours = AdamW8bit([torch.nn.Parameter(p.to(memory_format=torch.channels_last))])
    train(ours)
    other = AdamW8bit([torch.nn.Parameter(p.detach().clone(memory_format=layout))])
    other.load_state_dict(through_a_file(ours.state_dict()))
    a, b = (o.state_dict()["state"][0]["exp_avg"] for o in (ours, other))
    torch.testing.assert_close(a, b, atol=0.02 * a.abs().max().item(), rtol=0)
    assert torch.equal(a, b) == (layout == torch.channels_last)


def test_overrides_are_saved() -> None:
    ours = AdamW8bit(make_params())
    first, second, _ = all_params(ours)
    ours.set_bits(first, 32)
    ours.set_bits(second, 8)
    train(ours)
    assert "exp_avg" in ours.state[first]
    assert "exp_avg_codes" in ours.state[second]
    loaded = AdamW8bit(make_params())
    loaded.set_bits(all_params(loaded)[2], 32)
    loaded.load_state_dict(through_a_file(ours.state_dict()))
    assert [loaded.bits_of(p) for p in all_params(loaded)] == [32, 8, 8]
    # torch's says nothing of bits: what was set stays.
    theirs = torch.optim.AdamW(make_params())
    train(theirs)
    loaded.load_state_dict(theirs.state_dict())
    assert [loaded.bits_of(p) for p in all_params(loaded)] == [32, 8, 8]
    assert "exp_avg" in loaded.state[all_params(loaded)[0]]


def test_set_bits_converts_what_is_there() -> None:
    ours = AdamW8bit(make_params())
    train(ours)
    p = all_params(ours)[0]
    eight = {key: value.clone() for key, value in ours.state[p].items()}
    ours.set_bits(p, 32)
    assert ours.state[p]["exp_avg"].shape == p.shape
    assert ours.state[p]["step"] == 4
    ours.set_bits(p, 8)
    assert ours.state[p].keys() == eight.keys()
    # A block whose largest magnitude is negative is now a little smaller.
    for name in ("exp_avg_codes", "exp_avg_sq_codes"):
        assert (ours.state[p][name] == eight[name]).float().mean() > 0.9
    train(ours)


@pytest.mark.parametrize("copier", ["deepcopy", "pickle"])
def test_copies(copier: str) -> None:
    ours = Adam8bit(make_params(), lr=0.02)
    ours.set_bits(all_params(ours)[0], 32)
    train(ours)
    if copier == "deepcopy":
        other = copy.deepcopy(ours)
    else:
        other = pickle.loads(pickle.dumps(ours))
    assert type(other) is Adam8bit
    assert_same(ours, other)
    train(ours, 4)
    train(other, 4)
    assert_same(ours, other)
    assert other.bits_of(all_params(other)[0]) == 32
    other.add_param_group({"params": make_params()})


def test_hooks_see_torchs_format() -> None:
    ours = AdamW8bit(make_params())
    train(ours)
    seen = []
    ours.register_state_dict_post_hook(
        lambda _, saved: seen.append("exp_avg" in saved["state"][0])
    )
    ours.register_load_state_dict_pre_hook(
        lambda _, saved: seen.append("exp_avg" in saved["state"][0])
    )
    ours.register_load_state_dict_post_hook(
        lambda optimizer: seen.append(
            "exp_avg_codes" in optimizer.state[all_params(optimizer)[0]]
        )
    )
    ours.load_state_dict(ours.state_dict())
    assert seen == [True, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["param_groups"][0].update(amsgrad=True), "amsgrad must"),
        (
            lambda saved: saved["state"][2].update(exp_avg=torch.zeros(3)),
            r"exp_avg must be of the parameter's shape, \[64, 64\], got \[3\]",
        ),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(change: Any, message: str) -> None:
    ours, reference = AdamW8bit(make_params()), AdamW8bit(make_params())
    train(ours)
    train(reference)
    saved = ours.state_dict()
    change(saved)
    with pytest.raises(memscale.InputError, match=message):
        ours.load_state_dict(saved)
    assert_same(ours, reference)
    train(ours, 4)
    train(reference, 4)
    assert_same(ours, reference)
