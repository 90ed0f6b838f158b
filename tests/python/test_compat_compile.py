"""torch.compile before and after wrap: it works, and says what it does instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import memscale
from compat_twins import (
    Net,
    Record,
    assert_same,
    batch,
    config_of,
    each_mode,
    executor_of,
    make,
    run,
    steps,
    untouched_process,  # noqa: F401
)
from memscale import OptimizationMode as Mode

backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def said(caplog: pytest.LogCaptureFixture) -> int:
    """How often it was said that nothing is recomputed."""
    texts = [r.getMessage() for r in caplog.records if r.name == "memscale"]
    return sum("nothing is recomputed" in text for text in texts)


def expected_of(backend: str) -> Record:
    return run(steps(), torch.compile(make(), backend=backend))


@backends
@each_mode
def test_compiled_then_wrapped(
    backend: str, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    """Its graphs hold what the compiler chose: nothing is recomputed, it says."""
    expected = expected_of(backend)
    model = torch.compile(make(), backend=backend)
    assert memscale.wrap(model, config_of(mode)) is model
    assert said(caplog) == 1
    assert_same(expected, run(steps(), model))
    assert executor_of(model).stats().ops_recorded == 0
    memscale.detach(model)
    assert not hasattr(model._orig_mod, "_memscale_executor")


@backends
@each_mode
def test_wrapped_then_compiled(
    backend: str, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    expected = expected_of(backend)
    model = memscale.wrap(make(), config_of(mode))
    compiled = torch.compile(model, backend=backend)
    assert_same(expected, run(steps(), compiled))
    assert executor_of(model).stats().ops_recorded == 0
    assert said(caplog) == 1
    # Called as it is, it recomputes as ever.
    model(batch()).sum().backward()
    assert executor_of(model).stats().saves_dropped > 0


@backends
@pytest.mark.parametrize("order", ["before", "after"])
def test_compiled_in_place(
    backend: str, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    """model.compile(): the same object."""
    plain, ours = make(), make()
    plain.compile(backend=backend)
    if order == "before":
        ours.compile(backend=backend)
    memscale.wrap(ours, config_of())
    if order == "after":
        ours.compile(backend=backend)
    assert_same(run(steps(), plain), run(steps(), ours))
    assert executor_of(ours).stats().ops_recorded == 0
    assert said(caplog) == 1


@backends
@each_mode
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_compiled_part(
    backend: str, mode: Mode, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The part holds what its graph holds; the rest of the model recomputes."""
    plain, ours = make(), make()
    plain.blocks[0] = torch.compile(plain.blocks[0], backend=backend)
    if order == "before":
        ours.blocks[0] = torch.compile(ours.blocks[0], backend=backend)
    memscale.wrap(ours, config_of(mode))
    if order == "after":
        ours.blocks[0] = torch.compile(ours.blocks[0], backend=backend)
    assert_same(run(steps(), plain), run(steps(), ours))
    assert executor_of(ours).stats().saves_dropped > 0
    assert caplog.text.count("Net runs without a prediction: blocks.0 is compiled") == 1


def test_layers_compiled_one_by_one_share_a_graph() -> None:
    """As without wrap: dynamo gives up on code that it has compiled too often."""
    graphs, records = [], []
    for wrapped in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = make(lambda: Net(depth=6))
        if wrapped:
            memscale.wrap(model, config_of())
        for i in range(6):
            model.blocks[i] = torch.compile(model.blocks[i], backend="eager")
        records.append(run(steps(), model))
        graphs.append(counters["stats"]["unique_graphs"])
    assert_same(*records)
    assert graphs[0] == graphs[1]


@backends
def test_a_part_compiled_in_place(backend: str) -> None:
    plain, ours = make(), make()
    memscale.wrap(ours, config_of())
    for model in (plain, ours):
        model.blocks[1].compile(backend=backend)
    assert_same(run(steps(), plain), run(steps(), ours))
    assert executor_of(ours).stats().saves_dropped > 0


@backends
def test_a_break_in_the_graph(backend: str) -> None:
    """What dynamo cannot take runs as it is, in between."""

    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            for block in self.blocks:
                x = block(x)
                if x.sum() > 1e9:
                    x = -x
            return self.head(x)

    records = []
    for wrapped in (False, True):
        model = make(Broken)
        if wrapped:
            memscale.wrap(model, config_of())
        torch._dynamo.reset()
        records.append(run(steps(), torch.compile(model, backend=backend)))
    assert_same(*records)


@backends
def test_a_compiled_function_in_the_model(backend: str) -> None:
    @torch.compile(backend=backend)
    def activation(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * x + torch.tanh(x)

    class WithFunction(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(activation(x))

    plain, ours = make(WithFunction), memscale.wrap(make(WithFunction), config_of())
    assert_same(run(steps(), plain), run(steps(), ours))
    assert executor_of(ours).stats().saves_dropped > 0


def test_detached_after_compiling() -> None:
    """The compiled code is made anew, without us."""
    model = memscale.wrap(make(), config_of())
    compiled = torch.compile(model, backend="aot_eager")
    run(steps(), compiled)
    memscale.detach(model)
    plain = make()
    plain.load_state_dict(model.state_dict())
    assert_same(
        run(steps(), torch.compile(plain, backend="aot_eager")), run(steps(), compiled)
    )


@pytest.mark.full
@pytest.mark.parametrize("order", ["before", "after"])
def test_inductor(order: str) -> None:
    expected = expected_of("inductor")
    torch._dynamo.reset()
    model: nn.Module = make()
    if order == "after":
        memscale.wrap(model, config_of())
    compiled = torch.compile(model)
    if order == "before":
        memscale.wrap(compiled, config_of())
    assert_same(expected, run(steps(), compiled))
