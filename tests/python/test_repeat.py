"""Equal layers are traced a few times: the timeline must be as if each had been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import memscale
import models
from memscale._C import Timeline
from memscale.model.inputs import read_call
from memscale.trace import repeated_layers
from memscale.trace.repeated_layers import NotRepeatable
from memscale.trace.static import TracedStep, _StaticTracer

# Loaded before the first backward: autograd's engine counts devices there, once.
pytestmark = pytest.mark.usefixtures("sim")

LAYERS = 8
WIDTH = 32


class Block(nn.Module):
    def __init__(self, index: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Stack(nn.Module):
    """Blocks one after the other, then a loss. Subclasses do it in another way."""

    def __init__(self, make: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make(i) for i in range(LAYERS))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.first(x))).square().mean()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class NormBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class OddBlock(Block):
    """Does more at some index, which its settings do not tell."""

    odd: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.sin().exp() if self.index in self.odd else y


class OddAtTheEnd(OddBlock):
    odd = (LAYERS - 1,)


class OddAtTheStart(OddBlock):
    odd = (0,)


class OddFromTheMiddleOn(OddBlock):
    odd = (4, 5, 6, 7)


class Skips(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i < LAYERS // 2:
                kept.append(x)
            else:
                x = x + kept.pop()
        return x


class FromTheFirst(Stack):
    """Every block's input has the first one's output added to it."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        start = x
        for block in self.blocks:
            x = block(x + start)
        return x


class CalledTwice(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(super().body(x))


class MiddleCalledTwice(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 4:
                x = block(x)
        return x


class Collects(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return torch.stack(outputs).mean(0)


class Backwards(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class LeavesSomeOut(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i in (2, 5) else block(x)
        return x


class Checkpoints(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class CheckpointsSome(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i % 2 else block(x)
        return x


class Detaches(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x.detach() if i == 4 else x)
        return x


class WithoutGradients(Stack):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return super().body(x)


class Writes(Block):
    """Writes into its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.down(torch.relu(self.up(x))))


class Keeps(Block):
    """Keeps its output in an attribute until the next call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = super().forward(x)
        return self.kept


class TwoWays(nn.Module):
    """Gives two tensors, one of them needed only by the next block."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x).tanh() + y, self.b(y).tanh()


class Pairs(Stack):
    def __init__(self) -> None:
        super().__init__(TwoWays)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for block in self.blocks:
            x, y = block(x, y)
        return x + y


def shared_parameter() -> nn.Module:
    model = Stack()
    model.blocks[5].up.weight = model.blocks[2].up.weight
    return model


def hooked() -> nn.Module:
    model = Stack()
    model.blocks[4].register_forward_hook(lambda module, args, output: output * 2)
    return model


def hooked_inside() -> nn.Module:
    model = Stack()
    model.blocks[4].up.register_forward_pre_hook(lambda module, args: (args[0].exp(),))
    return model


def frozen_in_the_middle() -> nn.Module:
    model = Stack()
    model.blocks[4].requires_grad_(False)
    return model


def frozen_up_to_the_middle() -> nn.Module:
    model = Stack()
    model.first.requires_grad_(False)
    for block in model.blocks[:4]:
        block.requires_grad_(False)
    return model


def other_weights() -> nn.Module:
    model = Stack()
    for i in (3, 4):
        model.blocks[i].to(torch.float64).float()
        model.blocks[i].up.bias = None
    return model


def parametrized() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        weight_norm(block.up)
    return model


def plain_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS)


def two_rows() -> nn.Module:
    return nn.Sequential(Stack().blocks[0], *Stack().blocks, *Stack(NormBlock).blocks)


def gpt2(use_cache: bool) -> nn.Module:
    config = GPT2Config(
        vocab_size=models.VOCABULARY,
        n_positions=48,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        use_cache=use_cache,
        bos_token_id=0,
        eos_token_id=0,
    )
    return models.HuggingFace(GPT2LMHeadModel(config))


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return models.HuggingFace(LlamaForCausalLM(config))


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=48,
    )
    return models.HuggingFace(BertForMaskedLM(config))


def vectors() -> tuple[torch.Tensor, ...]:
    return (torch.randn(16, WIDTH),)


def sequences() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 8, WIDTH),)


def tokens() -> tuple[torch.Tensor, ...]:
    return models.tokens(length=16)


# Those that are repeated, and those that need not be: what counts is the timeline.
REPEATED: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple]]] = {
    "gpt2": (lambda: gpt2(False), tokens),
    "gpt2 with a cache": (lambda: gpt2(True), tokens),
    "llama": (llama, tokens),
    "bert": (bert, tokens),
    "encoder": (plain_encoder, sequences),
    "residual": (Stack, vectors),
    "dropout": (lambda: Stack(lambda i: Block(i, 0.1)), vectors),
    "batch norm": (lambda: Stack(NormBlock), vectors),
    "two rows": (two_rows, vectors),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "odd at the end": lambda: Stack(OddAtTheEnd),
    "odd at the start": lambda: Stack(OddAtTheStart),
    "odd from the middle on": lambda: Stack(OddFromTheMiddleOn),
    "a shared parameter": shared_parameter,
    "skip connections": Skips,
    "the first's output in all": FromTheFirst,
    "all called twice": CalledTwice,
    "one called twice": MiddleCalledTwice,
    "outputs collected": Collects,
    "in the other order": Backwards,
    "some left out": LeavesSomeOut,
    "checkpointed": Checkpoints,
    "some checkpointed": CheckpointsSome,
    "a hook on one": hooked,
    "a hook inside one": hooked_inside,
    "one frozen": frozen_in_the_middle,
    "some frozen": frozen_up_to_the_middle,
    "two of other shapes": other_weights,
    "detached": Detaches,
    "without gradients": WithoutGradients,
    "written in place": lambda: Stack(Writes),
    "kept in an attribute": lambda: Stack(Keeps),
    "two outputs": Pairs,
    "parametrized": parametrized,
    "dropout by layer": lambda: Stack(lambda i: Block(i, 0.1 * (i == 4))),
}


def tracer(model: nn.Module, sample: Any, device: str = "cpu") -> _StaticTracer:
    where = torch.device(device) if device == "cpu" else torch.device(device, 0)
    return _StaticTracer(model, read_call(sample), where, None, "adamw")


def timeline(step: TracedStep) -> list[tuple[Any, ...]]:
    trace = step.trace
    instants = Timeline(trace, "device", 1 if step.device.type == "cpu" else 512)
    return [
        (trace[i].name, trace[i].phase, trace[i].layer, instants[i].bytes)
        for i in range(len(trace))
    ]


def or_one_by_one(traced: _StaticTracer) -> TracedStep:
    """As trace_step does it."""
    try:
        return traced.trace(repeat=True)
    except NotRepeatable:
        return traced.trace(repeat=False)


@pytest.fixture
def count_repeats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers, by index, that were not run."""
    seen: list[int] = []
    original = repeated_layers.Row._repeat

    def counted(self: Any, index: int, tensors: Any) -> Any:
        seen.append(index)
        return original(self, index, tensors)

    monkeypatch.setattr(repeated_layers.Row, "_repeat", counted)
    return seen


@pytest.mark.parametrize("name", REPEATED)
def test_equal_layers_are_repeated(name: str, count_repeats: list[int]) -> None:
    make, batch = REPEATED[name]
    traced = tracer(make(), batch())
    repeated = traced.trace(repeat=True)
    assert set(range(2, LAYERS - 2)) <= set(count_repeats)
    each = traced.trace(repeat=False)
    assert timeline(repeated) == timeline(each)
    assert repeated.trace.num_saves == each.trace.num_saves


@pytest.mark.parametrize("name", ["gpt2", "batch norm"])
def test_on_the_simulated_device(
    name: str, sim: torch.device, count_repeats: list[int]
) -> None:
    make, batch = REPEATED[name]
    traced = tracer(make(), batch(), "sim")
    assert timeline(traced.trace(repeat=True)) == timeline(traced.trace(repeat=False))
    assert count_repeats


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_equal_is_traced_as_it_is(name: str) -> None:
    traced = tracer(OTHERS[name](), vectors())
    assert timeline(or_one_by_one(traced)) == timeline(traced.trace(repeat=False))


def test_depth_adds_bytes_but_no_work(count_repeats: list[int]) -> None:
    class Deep(Stack):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(i) for i in range(layers))

    x = torch.randn(16, WIDTH)
    peaks = [memscale.estimate(Deep(n), x).peak_bytes for n in (10, 20, 30)]
    assert len(count_repeats) == 6 + 16 + 26
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_rows_of_recurrent_blocks(kind: type[nn.RNNBase]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = kind(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.cells(x)[0])

    model = nn.Sequential(*(Recurrent() for _ in range(5)))
    x = torch.randn(4, 8, WIDTH)
    some = memscale.estimate(model, x, "sgd", loss_fn=lambda out: out.sum())
    one = memscale.estimate(model[:1], x, "sgd", loss_fn=lambda out: out.sum())
    assert some.breakdown["parameters"] == 5 * one.breakdown["parameters"]
    assert some.peak_bytes > one.peak_bytes
