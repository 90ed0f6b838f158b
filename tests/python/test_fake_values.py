"""Fake tensors that know their integers: what they know, and when they stop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from memscale.trace.fake_tensors import DATA_DEPENDENT_ERRORS, KnownIntegersMode
from memscale.trace.fakes_in_use import fakes_are_numbers

CPU = torch.device("cpu")


@pytest.fixture
def mode() -> Iterator[KnownIntegersMode]:
    mode = KnownIntegersMode()
    with mode:
        yield mode


def known(mode: KnownIntegersMode, value: torch.Tensor) -> FakeTensor:
    """A fake of the same values. (Made outside of the mode: ``value`` is real.)"""
    fake = mode.empty(value.shape, value.stride(), value.dtype, CPU)
    return mode.know(fake, value)


def real(values: object, dtype: torch.dtype | None = None) -> torch.Tensor:
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        return torch.tensor(values, dtype=dtype)


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def is_known(tensor: torch.Tensor) -> bool:
    try:
        tensor.flatten()[0].item()
    except DATA_DEPENDENT_ERRORS:
        return False
    return True


def values_of(tensor: torch.Tensor) -> list[int | float | bool]:
    flat = tensor.reshape(-1)
    return [flat[i].item() for i in range(flat.numel())]


class TestKnown:
    def test_integers_made_in_the_mode(self, mode: KnownIntegersMode) -> None:
        positions = torch.arange(5)
        assert isinstance(positions, FakeTensor)
        assert values_of(positions) == [0, 1, 2, 3, 4]
        assert (positions * 2 + 1).sum().item() == 25
        assert values_of(torch.ones(3, dtype=torch.long).cumsum(0)) == [1, 2, 3]
        assert torch.tensor([3, 4]).max().item() == 4

    def test_what_was_told(self, mode: KnownIntegersMode) -> None:
        ids = known(mode, real([[5, 0], [7, 8]]))
        assert ids.shape == (2, 2)
        assert ids.max().item() == 8
        assert values_of((ids != 0).sum(-1)) == [1, 2]

    def test_a_mask_decides(self, mode: KnownIntegersMode) -> None:
        mask = known(mode, real([[1, 1, 0], [1, 1, 1]]))
        assert not mask.bool().all()
        assert values_of(mask.all(dim=-1)) == [False, True]
        assert int(mask.sum(-1).max()) == 3
        assert torch.all(mask[1] == 1)

    def test_floats_made_of_nothing_else(self, mode: KnownIntegersMode) -> None:
        mask = known(mode, real([1, 0]))
        bias = (1.0 - mask.float()) * -1e4
        assert values_of(bias) == [0.0, -1e4]
        assert torch.ones(4).mean().item() == 1.0

    def test_shapes_stay_those_of_fakes(self, mode: KnownIntegersMode) -> None:
        x = torch.arange(6).view(2, 3)
        assert isinstance(x, FakeTensor)
        assert x.device == CPU
        assert values_of(x.t()) == [0, 3, 1, 4, 2, 5]
        assert values_of(x[:, 1]) == [1, 4]

    def test_on_another_device(self, sim: torch.device) -> None:
        mode, device = KnownIntegersMode(), sim
        with mode:
            fake = mode.empty((2,), (1,), torch.long, device)
            mode.know(fake, real([3, 4]))
            later = fake + torch.ones(2, dtype=torch.long, device=device)
            assert later.device == device
            assert values_of(later) == [4, 5]

    def test_a_single_random_number_is_a_half(self, mode: KnownIntegersMode) -> None:
        assert torch.rand([]).item() == 0.5
        assert not torch.rand([]) < 0.1


class TestUnknown:
    def test_values_of_floats(self, mode: KnownIntegersMode) -> None:
        with pytest.raises(DATA_DEPENDENT_ERRORS):
            unknown(3).sum().item()
        with pytest.raises(DATA_DEPENDENT_ERRORS):
            bool((unknown(3) > 0).any())
        with pytest.raises(DATA_DEPENDENT_ERRORS):
            (unknown(3) > 0).nonzero()
        with pytest.raises(DATA_DEPENDENT_ERRORS):
            unknown(3)[unknown(3) > 0]

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.empty(3, dtype=torch.long),
            lambda: torch.empty_like(torch.arange(3)),
            lambda: torch.arange(3).new_empty(3),
            lambda: torch.randint(9, (3,)),
            lambda: torch.randperm(3),
            lambda: torch.rand(3),
            lambda: torch.arange(3) + unknown(3).long(),
            lambda: unknown(3).argmax().view(1),
        ],
    )
    def test_what_nobody_can_know(self, mode: KnownIntegersMode, make: object) -> None:
        assert not is_known(make())

    def test_what_is_too_large_to_follow(self, mode: KnownIntegersMode) -> None:
        assert is_known(torch.zeros(1 << 10))
        assert not is_known(torch.zeros((1 << 16) + 1))
        assert is_known(torch.zeros(1 << 16, dtype=torch.long))
        assert not is_known(torch.zeros((1 << 22) + 1, dtype=torch.int8))

    def test_assumed_where_an_optimizer_steps(self, mode: KnownIntegersMode) -> None:
        mode.assume_values = True
        assert unknown(3).sum().item() == 1
        assert (unknown(3).sum() > 0).item() is False
        assert torch.arange(3).sum().item() == 3


class TestWrites:
    def test_are_followed(self, mode: KnownIntegersMode) -> None:
        x = torch.zeros(4, dtype=torch.long)
        x.add_(2)
        x[1] = 7
        x[2:].fill_(9)
        x.mul_(torch.tensor(2))
        assert values_of(x) == [4, 14, 18, 18]

    def test_show_in_views_made_before(self, mode: KnownIntegersMode) -> None:
        x = torch.arange(6)
        view, other = x.view(2, 3), x[1:3]
        view[0, 1] = 50
        assert values_of(other) == [50, 2]
        other.zero_()
        assert values_of(x) == [0, 0, 0, 3, 4, 5]

    def test_do_not_show_in_copies(self, mode: KnownIntegersMode) -> None:
        x = torch.arange(3)
        copy = x.clone()
        x.zero_()
        assert values_of(copy) == [0, 1, 2]

    def test_of_unknown_values_make_it_unknown(self, mode: KnownIntegersMode) -> None:
        x = torch.zeros(4, dtype=torch.long)
        view = x[:2]
        before = x + 1
        x.copy_(unknown(4))
        assert not is_known(x)
        assert not is_known(view)
        assert not is_known(x + 1)
        assert values_of(before) == [1, 1, 1, 1]

    def test_of_unknown_values_through_a_view(self, mode: KnownIntegersMode) -> None:
        x = torch.zeros(4, dtype=torch.long)
        x[:2].copy_(unknown(2))
        assert not is_known(x)
        assert not is_known(x[2:])  # the whole storage is given up

    def test_by_an_unknown_mask(self, mode: KnownIntegersMode) -> None:
        x = torch.zeros(4)
        x.masked_fill_(unknown(4) > 0, 1.0)
        assert not is_known(x)

    def test_of_random_values(self, mode: KnownIntegersMode) -> None:
        x = torch.zeros(4, dtype=torch.long)
        x.random_(9)
        assert not is_known(x)
        y = torch.zeros(4)
        y.uniform_()
        assert not is_known(y)

    def test_through_out(self, mode: KnownIntegersMode) -> None:
        x = torch.zeros(3)
        torch.add(unknown(3), 1, out=x)
        assert not is_known(x)


class TestDynamicShapes:
    def test_nonzero(self, mode: KnownIntegersMode) -> None:
        mask = known(mode, real([[1, 0, 1], [0, 0, 1]]))
        places = mask.nonzero()
        assert isinstance(places, FakeTensor)
        assert values_of(places) == [0, 0, 0, 2, 1, 2]
        assert places.shape == (3, 2)
        rows, columns = mask.nonzero(as_tuple=True)
        assert rows.shape == columns.shape == (3,)

    def test_a_boolean_index(self, mode: KnownIntegersMode) -> None:
        mask = known(mode, real([True, False, True]))
        hidden = unknown(3, 8)
        assert hidden[mask].shape == (2, 8)
        assert not is_known(hidden[mask])
        assert values_of(torch.arange(3)[mask]) == [0, 2]
        square = known(mode, real([[True, False], [True, True]]))
        assert unknown(2, 2, 4)[square].shape == (3, 4)

    def test_a_boolean_index_of_unknown_values(self, mode: KnownIntegersMode) -> None:
        with pytest.raises(DATA_DEPENDENT_ERRORS):
            torch.arange(3)[unknown(3) > 0]

    def test_unique_and_repeats(self, mode: KnownIntegersMode) -> None:
        x = known(mode, real([3, 1, 3]))
        assert values_of(x.unique()) == [1, 3]
        assert torch.arange(3).repeat_interleave(x).shape == (7,)

    def test_sizes_from_values(self, mode: KnownIntegersMode) -> None:
        lengths = known(mode, real([2, 5]))
        assert torch.zeros(int(lengths.max()), 4).shape == (5, 4)
        sizes = [int(lengths[0]), int(lengths[1])]
        assert [part.shape[0] for part in unknown(7).split(sizes)] == sizes


class TestRealTensors:
    """Caches of libraries have some from earlier calls."""

    def test_are_read_as_they_are(self, mode: KnownIntegersMode) -> None:
        cached = real([[1.0, 2.0]])
        result = unknown(3, 2) + cached
        assert isinstance(result, FakeTensor)
        assert result.shape == (3, 2)

    def test_are_not_written(self, mode: KnownIntegersMode) -> None:
        cached = real([1.0, 2.0])
        cached.add_(unknown(2))
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            assert cached.tolist() == [1.0, 2.0]


class TestNumbersInLists:
    def test_known_ones_become_a_tensor(self, mode: KnownIntegersMode) -> None:
        numbers = [torch.arange(3)[i] for i in range(3)]
        with fakes_are_numbers():
            assert values_of(torch.tensor(numbers)) == [0, 1, 2]
            nested = torch.tensor([numbers, (4, 5, 6)])
        assert values_of(nested) == [0, 1, 2, 4, 5, 6]

    def test_unknown_ones_are_an_error(self, mode: KnownIntegersMode) -> None:
        with fakes_are_numbers(), pytest.raises(DATA_DEPENDENT_ERRORS):
            torch.tensor([unknown(1)[0]])
