"""Training under replay is training: the same bits after every step.

Five AdamW steps of each architecture, dropout on; losses, every gradient of every
step, parameters, buffers, optimizer state and random states compared with
torch.equal against the plain model on the same device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import pytest
import torch

from memscale import replay
from replay_training import ARCHITECTURES, Recipe, Run, first_difference, train

# sim: loaded before the first backward, where autograd's engine counts devices.
pytestmark = pytest.mark.usefixtures("sim", "one_thread")

DEVICES = ["cpu", "sim"]
POLICIES = ["cheap", "block"]

# Without blocks: what a layer of one op saves is its input, or the next one's.
NOTHING_TO_DROP = {"hypernetwork", "unrolled_tied"}

RECIPES = {
    "accumulate": Recipe(batches=3, clip=0.5),
    "together": Recipe(batches=2, together=True),
    "autocast": Recipe(autocast=True),
    "autocast_together": Recipe(autocast=True, batches=2, together=True, clip=1.0),
    "bfloat16": Recipe(dtype=torch.bfloat16),
}
# Which architectures are trained by which of them.
VARIANTS = {
    "accumulate": "bert gru twins",
    "together": "gpt2 discriminator lstm_cells graph",
    "autocast": "albert attention autoencoder convnext encoder gpt2_lora llama lstm "
    "mixtral resnet_channels_last t5 vit",
    "autocast_together": "bert_open_attention tied_lstm",
    "bfloat16": "gpt2 residual_mlp swin wavenet",
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """These tensors are too small to be shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def plain(name: str, device: str, recipe: Recipe) -> Run:
    """The run without replay, shared by the policies that are compared with it."""
    run = train(name, device, None, recipe)
    assert all(t.isfinite().all() for t in run.recorded.values())
    return run


def assert_equal_to_plain(
    name: str,
    device: str,
    policy: replay.Policy | Mapping[str, replay.Policy],
    recipe: Recipe,
) -> replay.Stats:
    run = train(name, device, policy, recipe)
    assert first_difference(plain(name, device, recipe), run) is None
    assert run.stats is not None
    return run.stats


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_as_the_plain_model_does(name: str, device: str, policy: str) -> None:
    stats = assert_equal_to_plain(name, device, policy, Recipe())
    if policy != "block" or name not in NOTHING_TO_DROP:
        assert stats.saves_dropped > 0
        assert stats.bytes_dropped > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("recipe", "name"),
    [(recipe, name) for recipe, names in VARIANTS.items() for name in names.split()],
)
def test_other_loops(recipe: str, name: str, device: str, policy: str) -> None:
    """Accumulation, clipping, several forwards before a backward, bf16."""
    stats = assert_equal_to_plain(name, device, policy, RECIPES[recipe])
    assert stats.saves_dropped > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gpt2", "efficientnet", "lstm"])
def test_an_empty_plan_drops_nothing(name: str, device: str) -> None:
    """Ops are taped, and nothing is large enough to be dropped."""
    run = train(name, device, "block", min_bytes=1 << 40)
    assert first_difference(plain(name, device, Recipe()), run) is None
    stats = run.stats
    assert stats is not None
    assert stats.saves_kept > 0
    assert (stats.saves_dropped, stats.bytes_dropped, stats.ops_replayed) == (0, 0, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_layers_with_policies_of_their_own(device: str) -> None:
    """Only the layers that are named drop anything: less than all of them do."""
    some = {"model.transformer.h.0": "block", "*.h.1": "cheap"}
    one = {"model.transformer.h.0": "block"}
    dropped = [
        assert_equal_to_plain("gpt2", device, policy, Recipe()).saves_dropped
        for policy in (one, some, "block")
    ]
    assert 0 < dropped[0] < dropped[1] < dropped[2]


@pytest.mark.parametrize(("made_on", "device"), [("cpu", "sim"), ("sim", "cpu")])
@pytest.mark.parametrize("recipe", [Recipe(), RECIPES["autocast"]], ids=["", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "attention", "lstm"])
def test_moved_after_attaching(
    name: str, recipe: Recipe, made_on: str, device: str
) -> None:
    """Other ops are leaves on another device, above all under autocast."""
    run = train(name, device, "block", recipe, made_on=made_on)
    assert first_difference(plain(name, device, recipe), run) is None
    assert run.stats is not None
    assert run.stats.saves_dropped > 0


@pytest.mark.parametrize("device", DEVICES)
def test_another_seed_is_a_difference(device: str) -> None:
    """The comparison sees what a wrong mask of dropout would change."""
    other = train("gpt2", device, None, seed=8)
    assert first_difference(plain("gpt2", device, Recipe()), other) == "step 0: loss 0"


def test_enough_architectures() -> None:
    assert len(ARCHITECTURES) >= 40
