"""Deep copies: of containers in C++, of the rest as copy.deepcopy would."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import itertools
import random
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memscale.trace.copies import CannotCopy, Copies, is_library


def copied(value: Any) -> Any:
    return Copies(lambda tensor: tensor.clone()).copy(value, "it")


class Slotted:
    __slots__ = ("first", "second")

    def __init__(self, first: Any) -> None:
        self.first = first


@dataclasses.dataclass
class Plain:
    part: Any
    other: Any = None


class Pair(collections.namedtuple("Pair", "a b")):
    pass


class Kind(enum.Enum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [
        [1, [2, (3, [4])], {5: {6}, "x": frozenset({7})}],
        collections.OrderedDict(b=[1], a=[2]),
        collections.defaultdict(list, {1: [2]}),
        collections.deque([[1], [2]], maxlen=3),
        collections.Counter("hello"),
        Pair([1], 2),
        bytearray(b"abc"),
        {(1, 2): [3], Kind.ONE: Kind.ONE},
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_and_apart(value: Any) -> None:
    made = copied(value)
    assert made == value == copy.deepcopy(value)
    assert type(made) is type(value)
    assert repr(made) == repr(value)
    assert made is not value or isinstance(value, range)


def test_what_is_shared_stays_shared() -> None:
    inner: list[Any] = []
    outer = Plain(inner, {"again": (inner, {1: inner})})
    made = copied([outer, outer, inner])
    assert made[0] is made[1]
    assert made[0].part is made[2]
    assert made[0].other["again"][0] is made[2]
    assert made[0].other["again"][1][1] is made[2]
    assert made[2] is not inner


def test_what_contains_itself() -> None:
    ring: list[Any] = []
    pair = (ring,)
    ring.append(pair)
    made = copied(pair)
    assert made[0][0] is made
    knows_itself = Plain(None)
    knows_itself.part = {"self": knows_itself}
    made = copied(knows_itself)
    assert made.part["self"] is made


def test_tuples_of_atoms_are_the_same() -> None:
    value = (1, "a", (2.0, None))
    assert copied(value) is value


def test_slots() -> None:
    made = copied(Slotted([1]))
    assert made.first == [1]
    assert not hasattr(made, "second")


def test_too_deep() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CannotCopy, match=r"it cannot be copied .RecursionError"):
        copied(deep)


def test_a_dictionary_that_changes_meanwhile() -> None:
    changing: dict[Any, Any] = {}

    class Growing:
        def __reduce__(self) -> Any:
            changing[len(changing)] = 1
            return Growing, ()

    changing["first"] = Growing()
    with pytest.raises(CannotCopy, match="changed while it was copied"):
        copied(changing)


def test_random_numbers_go_on_alike() -> None:
    generators: list[Any] = [
        random.Random(1),
        np.random.default_rng(1),
        np.random.RandomState(1),
        torch.Generator().manual_seed(1),
        itertools.count(3),
        iter([1, 2, 3]),
    ]

    def draw(each: Any) -> Any:
        if isinstance(each, torch.Generator):
            return torch.rand(2, generator=each).tolist()
        return each.random() if hasattr(each, "random") else next(each)

    made = copied(generators)
    assert [draw(each) for each in made] == [draw(each) for each in generators]


def test_methods_go_to_the_copies() -> None:
    values: list[int] = []
    plain = Plain([])
    append, copy_of_append, bound = copied(
        (values.append, functools.partial(values.append, 1), plain.__repr__)
    )
    append(1)
    copy_of_append()
    assert values == []
    assert append.__self__ == [1, 1]
    assert bound.__self__ is not plain


def test_weak_references_point_to_copies() -> None:
    plain = Plain([1])
    made, reference = copied((plain, weakref.ref(plain)))
    assert reference() is made


def test_caches_start_empty() -> None:
    cached = functools.lru_cache(maxsize=7)(lambda x: [x])
    cached(1)
    made = copied(cached)
    assert made(1) is not cached(1)
    assert made.cache_parameters() == {"maxsize": 7, "typed": False}


def test_read_only_mappings() -> None:
    made = copied(types.MappingProxyType({"a": [1]}))
    assert made == {"a": [1]}


def test_arrays() -> None:
    array = np.zeros(3)
    made = copied(array)
    made[0] = 1
    assert array[0] == 0
    array.flags.writeable = False
    assert copied(array) is array


def test_modules_and_their_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.tied = model[0]
    made = copied(model)
    assert type(made) is nn.Sequential
    assert made.tied is made[0] is not model[0]
    assert torch.equal(made[0].weight, model[0].weight)
    assert made[0].weight is not model[0].weight


def test_what_has_no_copy() -> None:
    with pytest.raises(CannotCopy, match=r"it cannot be copied .TypeError"):
        copied([(x for x in [1])])
    with pytest.raises(CannotCopy, match="more than 100000 objects"):
        copied([Plain(None) for _ in range(100_001)])


def test_which_modules_are_libraries() -> None:
    assert is_library("torch.nn.modules.linear")
    assert is_library("collections.abc")
    assert is_library("builtins")
    assert not is_library("__main__")
    assert not is_library(__name__)
    assert not is_library(None)
