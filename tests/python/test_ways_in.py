"""When layers tell of their calls: only while somebody has to hear of them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, replay
from memscale._C import find_compiled, has_other_classes
from memscale.calls.targets import ShardingCheck
from memscale.calls.way_in import WayIn, way_in_of


def _make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
    )


def _told(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if way_in_of(part) is not None]


def _grads(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 32).view(4, 8)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_layers_have_no_way_in_while_all_keep() -> None:
    model = memscale.wrap(_make(), Config(enable_logging=False))
    assert _told(model) == ["", "0", "1", "2"]  # until there is a plan
    _grads(model)
    assert all(
        layer.technique == "keep" for layer in model._memscale_executor.plan.layers
    )
    assert _told(model) == [""]
    memscale.detach(model)
    assert _told(model) == []


def test_ways_in_come_and_go_with_the_policies() -> None:
    expected = _grads(_make())
    model = _make()
    handle = replay.attach(model, "block", min_bytes=0)
    for policy, told in (
        ("block", ["", "0", "1", "2"]),
        ("keep", [""]),
        ("cheap", ["", "0", "1", "2"]),
    ):
        handle.set_policies([policy] * 4)
        assert _told(model) == told
        handle.reset_stats()
        assert all(map(torch.equal, expected, _grads(model)))
        assert (handle.stats().saves_dropped > 0) == (policy != "keep")
    handle.set_policies(["keep"] * 4, tell=True)  # a technique wants to hear of them
    assert _told(model) == ["", "0", "1", "2"]
    assert all(map(torch.equal, expected, _grads(model)))


def test_a_layer_of_an_attached_model_cannot_be_attached_while_idle() -> None:
    model = _make()
    handle = replay.attach(model, "block")
    handle.set_policies(["keep"] * 4)
    with pytest.raises(memscale.PlanError, match="attached already"):
        replay.attach(model[1], "block")
    handle.detach()
    replay.attach(model[1], "block").detach()


def test_policies_that_change_in_a_call_of_another_thread() -> None:
    """That call is observed in part: its gradients are the same."""
    expected = _grads(_make())
    model = _make()
    handle = replay.attach(model, "block", min_bytes=0)
    arrived, changed = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            arrived.set()
            assert changed.wait(60)
            return x

    model[1].insert(1, Waits())
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(_grads(model)))
    thread.start()
    assert arrived.wait(60)
    handle.set_policies(["keep"] * 4)
    changed.set()
    thread.join()
    assert found
    assert all(map(torch.equal, expected, found))


def test_a_layer_that_is_called_after_an_interrupted_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What Ctrl-C left of the model's call is ended by the layer's."""
    model = _make()
    handle = replay.attach(model, "block", min_bytes=0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(replay.Replay, "_leave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(4, 8))
    assert handle._engine.is_entered
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    model[0](torch.ones(4, 8)).sum().backward()
    assert not handle._engine.is_entered
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_other_classes() -> None:
    model = _make()
    known = {nn.Sequential, nn.Linear, nn.Tanh}
    assert not has_other_classes(model, known)
    assert has_other_classes(model, known - {nn.Tanh})
    check = ShardingCheck()
    check(model)

    class FSDPModule:  # by its name
        pass

    model[1].__class__ = type("Sharded", (FSDPModule, nn.Sequential), {})
    with pytest.raises(memscale.InputError, match="FSDPModule"):
        check(model)


def test_find_compiled() -> None:
    model = _make()
    assert find_compiled(model, WayIn) == []
    model[1].compile(backend="eager")
    model[0][0] = torch.compile(model[0][0], backend="eager")  # type: ignore[assignment]
    assert find_compiled(model, WayIn) == [model[0][0], model[1]]
