"""Planning runs the model's code on copies: nothing of the user's is touched."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memscale
from compat_twins import executor_of
from memscale import Config
from memscale.model.inputs import Call
from memscale.trace import leaks
from memscale.trace.copies import Copies
from memscale.trace.static import CannotCopy
from memscale.trace.untouched import Untouched

WIDTH = 16


def batch() -> torch.Tensor:
    return torch.ones(4, WIDTH)


class Layer(nn.Module):
    """A linear layer that does ``work`` with its output and gives what that gives."""

    def __init__(self, work: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.work = work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu()
        return y * self.work(y)


def planned(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Wrapped, and planned for these arguments; no step is run."""
    memscale.wrap(model, Config(enable_logging=False, force_optimize=True))
    if not args and not kwargs:
        args = (batch(),)
    plan = executor_of(model).plan_for(Call(args, kwargs))
    assert plan is not None
    return model


def fakes() -> list[FakeTensor]:
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), FakeTensor)]


@pytest.fixture(autouse=True)
def no_fake_is_left() -> Any:
    before = len(fakes())
    yield
    assert len(fakes()) <= before


# ---- what code names ----

losses: list[torch.Tensor] = []
count = 0
by_name: dict[str, Any] = {"calls": 0}
generator = np.random.default_rng(3)


def in_a_list(y: torch.Tensor) -> float:
    losses.append(y.mean())
    return 1.0


def in_a_variable(y: torch.Tensor) -> int:
    global count
    count += 1
    return count


def in_a_new_variable(y: torch.Tensor) -> float:
    global made_by_a_call
    made_by_a_call = y
    return 1.0


def in_a_dictionary(y: torch.Tensor) -> int:
    by_name["calls"] += 1
    by_name["last"] = y
    return int(by_name["calls"])


def from_a_generator(y: torch.Tensor) -> float:
    return float(generator.random())


def through_another(y: torch.Tensor) -> float:
    return in_a_list(y) + in_a_variable(y)


def in_a_default(y: torch.Tensor, seen: list[Any] = []) -> int:  # noqa: B006
    seen.append(y)
    return len(seen)


def in_itself(y: torch.Tensor) -> int:
    in_itself.calls = getattr(in_itself, "calls", 0) + 1  # type: ignore[attr-defined]
    return int(in_itself.calls)  # type: ignore[attr-defined]


@functools.lru_cache
def table(length: int) -> torch.Tensor:
    return torch.ones(length)


def in_a_cache(y: torch.Tensor) -> torch.Tensor:
    return table(y.shape[-1])


class Counter:
    calls = 0
    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def of_the_class(cls, y: torch.Tensor) -> int:
        cls.calls += 1
        cls.seen.append(y)
        return cls.calls

    @classmethod
    def of_a_new_attribute(cls, y: torch.Tensor) -> float:
        cls.latest = y  # type: ignore[attr-defined]
        return 1.0


def state() -> Any:
    return (
        list(losses),
        count,
        dict(by_name),
        generator.bit_generator.state,
        "made_by_a_call" in globals(),
        in_a_default.__defaults__,
        [len(part) for part in in_a_default.__defaults__ or ()],
        vars(in_itself).copy(),
        table.cache_info(),
        {k: v for k, v in vars(Counter).items() if not k.startswith("__")},
        len(Counter.seen),
    )


@pytest.mark.parametrize(
    "work",
    [
        in_a_list,
        in_a_variable,
        in_a_new_variable,
        in_a_dictionary,
        from_a_generator,
        through_another,
        in_a_default,
        in_itself,
        in_a_cache,
        Counter.of_the_class,
        Counter.of_a_new_attribute,
    ],
    ids=lambda work: work.__name__,
)
def test_what_functions_write_to(work: Callable[[torch.Tensor], Any]) -> None:
    before = repr(state())
    planned(nn.Sequential(Layer(work), Layer(work)))
    memscale.estimate(nn.Sequential(Layer(work)), batch())
    assert repr(state()) == before


def test_closures() -> None:
    numbers, calls = iter([1.0, 2.0, 3.0]), 0
    mine, torchs = random.Random(3), torch.Generator().manual_seed(3)
    seen: list[torch.Tensor] = []
    append = seen.append
    before = mine.getstate(), torchs.get_state()

    def work(y: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        append(y)
        noise = torch.rand(y.shape, generator=torchs)
        return noise * mine.random() * next(numbers)

    planned(Layer(work))
    assert (calls, seen, next(numbers)) == (0, [], 1.0)
    assert mine.getstate() == before[0]
    assert torch.equal(torchs.get_state(), before[1])


def test_attributes_of_the_models_class() -> None:
    class Counting(Layer):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return super().forward(x) * Counting.calls

    planned(Counting(lambda y: 1.0))
    assert Counting.calls == 0


def test_hooks_of_all_modules() -> None:
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(output)
    )
    try:
        planned(Layer(lambda y: 1.0))
    finally:
        handle.remove()
    assert seen == []


def test_names_stand_for_the_same_after_an_error() -> None:
    def work(y: torch.Tensor) -> float:
        losses.append(y)
        raise ArithmeticError("half-way")

    with pytest.raises(ArithmeticError):
        memscale.estimate(Layer(work), batch())
    assert losses == []


# ---- arguments ----


class Context:
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.calls = 0
        self.state: torch.Tensor | None = torch.ones(WIDTH)

    def add(self, loss: torch.Tensor) -> None:
        self.losses.append(loss)
        self.calls += 1
        self.state = loss


class Contextual(Layer):
    def __init__(self) -> None:
        super().__init__(lambda y: 1.0)

    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x)
        if isinstance(context, Context):
            y = y + context.state
            context.add(y.mean())
        else:
            context["y"] = y
        return y


@pytest.mark.parametrize("by_keyword", [False, True])
def test_an_object_as_argument(by_keyword: bool) -> None:
    context = Context()
    state = context.state
    if by_keyword:
        planned(Contextual(), batch(), context=context)
    else:
        planned(Contextual(), batch(), context)
    assert (context.losses, context.calls) == ([], 0)
    assert context.state is state


def test_a_dictionary_as_argument() -> None:
    held: dict[str, Any] = {}
    planned(Contextual(), batch(), held)
    assert held == {}


def test_a_cache_as_argument() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config)
    cache = transformers.DynamicCache(config=config)
    ids = torch.ones(2, 8, dtype=torch.long)
    planned(model, input_ids=ids, labels=ids, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 0
    loss = model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
    loss.backward()
    assert cache.get_seq_length() == 8


# ---- attributes ----


def test_generators_of_the_model() -> None:
    class Noisy(Layer):
        def __init__(self) -> None:
            super().__init__(self.noise)
            self.generators = [torch.Generator().manual_seed(s) for s in (1, 2)]

        def noise(self, y: torch.Tensor) -> torch.Tensor:
            first, second = self.generators
            return torch.rand(y.shape, generator=first) * torch.rand(
                y.shape, generator=second
            )

    model = Noisy()
    before = [g.get_state() for g in model.generators]
    planned(model)
    assert all(map(torch.equal, before, [g.get_state() for g in model.generators]))


def test_what_modules_share_stays_shared() -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.aux: list[torch.Tensor] = []
            self.layers = nn.ModuleList([Layer(self.collect), Layer(self.collect)])
            self.layers[0].aux = self.aux  # empty, and the same
            self.layers[1].owner = weakref.ref(self)

        def collect(self, y: torch.Tensor) -> float:
            self.layers[0].aux.append(y.mean())
            return 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.aux.clear()
            for layer in self.layers:
                x = layer(x)
            assert self.layers[1].owner() is self
            assert len(self.aux) == 2
            return x + sum(self.aux)

    model = planned(Collecting())
    assert model.aux == []


def test_parameters_that_forward_converts_to_what_they_are() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.classifier = self.classifier.to(torch.float32)
            return self.classifier(x)

    assert memscale.estimate(Router(), batch()).method == "static"
    planned(Router())


def test_parameters_that_forward_converts_are_recorded() -> None:
    class Narrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear.to(torch.float32)(x)

    assert memscale.estimate(Narrowing(), batch()).method == "recorded"


# ---- what cannot be copied ----


def test_without_a_plan_where_something_cannot_be_copied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def numbers() -> Any:
        yield from itertools.count()

    stream = numbers()
    model = Layer(lambda y: float(next(stream)))
    with pytest.raises(CannotCopy, match=r"'stream' of a closure cannot be copied"):
        memscale.estimate(model, batch())
    memscale.wrap(model)
    model(batch()).mean().backward()
    assert executor_of(model).plan is None
    assert next(stream) == 1  # one step was run
    assert "'stream' of a closure cannot be copied" in caplog.text


def test_locks_are_shared() -> None:
    lock = threading.Lock()

    def work(y: torch.Tensor) -> float:
        with lock:
            return 1.0

    planned(Layer(work))
    assert not lock.locked()


# ---- what libraries keep ----


@pytest.mark.parametrize("kind", ["list", "dict", "set", "cache"])
def test_fakes_are_taken_out_of_libraries(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: Any = {"list": [1], "dict": {0: 1}, "set": {1}, "cache": None}[kind]
    cached = functools.lru_cache(lambda x: x)

    def keep(y: torch.Tensor) -> float:
        if kind == "list":
            kept.append(y)
        elif kind == "dict":
            kept["y"] = y
        elif kind == "set":
            kept.add(y)
        else:
            cached(y)
        return 1.0

    monkeypatch.setattr("memscale.trace.untouched.is_library", lambda module: True)
    planned(Layer(keep))
    assert kept in ([1], {0: 1}, {1}, None)
    assert cached.cache_info().currsize == 0


def test_fakes_that_stay_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        held: Any = None

    def keep(y: torch.Tensor) -> float:
        Library.held = y
        return 1.0

    monkeypatch.setattr("memscale.trace.untouched.is_library", lambda module: True)
    with pytest.raises(memscale.TraceError, match="kept by code of a library"):
        memscale.estimate(Layer(keep), batch())
    Library.held = None


def test_nothing_stays_frozen() -> None:
    gc.unfreeze()
    planned(Layer(lambda y: 1.0))
    assert gc.get_freeze_count() == 0
    with leaks.only_new_objects(), leaks.only_new_objects():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


# ---- what copies would do ----


class Slot:
    """Gives its place back at its end, as batches of a pool of buffers do."""

    free: list[int] = []  # noqa: RUF012

    def __init__(self, place: int) -> None:
        self.place = place

    def __del__(self) -> None:
        Slot.free.append(self.place)


def test_nothing_is_copied_that_does_something_at_its_end() -> None:
    slot = Slot(7)
    Slot.free.clear()
    model = Contextual()
    memscale.wrap(model, Config(enable_logging=False, force_optimize=True))
    assert executor_of(model).plan_for(Call((batch(), slot), {})) is None
    gc.collect()
    assert Slot.free == []


def test_other_threads_see_no_copies() -> None:
    """A thread that runs meanwhile would meet fakes in a global of its own."""
    model = Layer(in_a_list)
    memscale.wrap(model, Config(enable_logging=False, force_optimize=True))
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert executor_of(model).plan_for(Call((batch(),), {})) is None
    finally:
        done.set()
        other.join()


def test_names_are_put_back_though_one_of_them_fails() -> None:
    mine = list(losses)
    untouched = Untouched()
    untouched._restores += [lambda: losses.append(torch.ones(())), _fails]
    with pytest.raises(ZeroDivisionError), untouched.on(Copies(torch.clone)):
        pass
    assert len(losses) == len(mine) + 1
    losses.pop()


def _fails() -> None:
    raise ZeroDivisionError
