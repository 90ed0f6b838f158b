"""What a model is called with, and where its loss comes from."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memscale._C import InputError

__all__ = [
    "Call",
    "DescribedCall",
    "build_call",
    "describe",
    "find_loss",
    "read_call",
    "tensors_in",
]

LossFn = Callable[..., torch.Tensor]

# Stated in every estimate that uses it.
STAND_IN = "a stand-in: the mean of the squares of the model's outputs"


@dataclass
class Call:
    """One call of a model: its arguments, and what the loss needs beside."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    has_target: bool = False
    source: str = "sample_input"
    # The call is about to be made, each module in the mode that it has now. Otherwise
    # a model in eval() is put into training mode first.
    is_made_now: bool = False

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """The same call on other tensors; one that is passed twice is changed once."""
        changed: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            return changed[id(tensor)]

        args, kwargs, target = pytree.tree_map_only(
            torch.Tensor, once, (self.args, self.kwargs, self.target)
        )
        return dataclasses.replace(self, args=args, kwargs=kwargs, target=target)

    def copied(self, copy: Callable[[Any, str], Any]) -> Call:
        """The same call on copies of everything."""
        args, kwargs, target = copy(
            (self.args, self.kwargs, self.target), "an argument of the model"
        )
        return dataclasses.replace(self, args=args, kwargs=kwargs, target=target)

    def tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.args, self.kwargs, self.target))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def run(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def __str__(self) -> str:
        parts = [describe(arg) for arg in self.args]
        parts += [f"{name}={describe(arg)}" for name, arg in self.kwargs.items()]
        return ", ".join(parts) or "no arguments"


@dataclass(frozen=True)
class DescribedCall:
    """A call in words: what is left of one whose arguments are not held."""

    text: str
    source: str = "sample_input"

    def __str__(self) -> str:
        return self.text


def describe(value: Any) -> str:
    """A tensor as "float32[2, 3] on cpu", anything else by its type or value."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_nested:  # it has no sizes
            return f"nested {dtype} on {value.device}"
        return f"{dtype}{list(value.shape)} on {value.device}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__


def read_call(sample: Any, loss_fn: LossFn | None = None) -> Call:
    """A call from what users have at hand.

    A tensor is the one argument, a tuple or list the positional ones, a mapping the
    keyword ones (a tokenizer's output is one). With a ``loss_fn`` of two arguments
    the batch is a dataset's pair: the last element of a tuple or list is the
    target, the rest goes to the model; of a mapping the target is the whole batch.
    """
    takes_target = loss_fn is not None and _num_required(loss_fn) >= 2
    if isinstance(sample, torch.Tensor):
        if takes_target:
            raise InputError(
                "sample_input must be (inputs, target) for a loss_fn of two "
                f"arguments, got {describe(sample)}"
            )
        return Call((sample,), {})
    if isinstance(sample, Mapping):
        if not all(isinstance(key, str) for key in sample):
            raise InputError(
                f"sample_input must have names as keys, got {list(sample)}"
            )
        batch = dict(sample)
        return Call((), batch, batch if takes_target else None, takes_target)
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        if not takes_target:
            return Call(tuple(sample), {})
        if len(sample) < 2:
            raise InputError(
                "sample_input must be (inputs, target) for a loss_fn of two "
                f"arguments, got {len(sample)} element(s)"
            )
        return Call(tuple(sample[:-1]), {}, sample[-1], True)
    hint = ""
    if isinstance(sample, torch.utils.data.DataLoader):
        hint = ": pass one batch of it, next(iter(loader))"
    raise InputError(
        "sample_input must be a tensor, a tuple, a list or a mapping, "
        f"got {type(sample).__name__}{hint}"
    )


def _num_required(function: Callable[..., Any]) -> int:
    """How many positional arguments it must be given; 1 if it does not say."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def find_loss(output: Any, call: Call, loss_fn: LossFn | None) -> tuple[Any, str]:
    """The loss and where it came from; (None, why) if nothing needs a gradient."""
    if loss_fn is not None:
        loss = loss_fn(output, call.target) if call.has_target else loss_fn(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise InputError(
                f"loss_fn must return a single number, got {describe(loss)}"
            )
        if not loss.requires_grad:
            return None, "loss_fn, but it needs no gradient: there is no backward"
        return loss, "loss_fn"
    for candidate in _loss_candidates(output):
        if (
            isinstance(candidate, torch.Tensor)
            and candidate.numel() == 1
            and candidate.requires_grad
        ):
            return candidate, "the model's own"
    outputs = [
        leaf
        for leaf in _tensor_leaves(output)
        if leaf.requires_grad and leaf.is_floating_point()
    ]
    if not outputs:
        return None, "none: no output needs a gradient, so there is no backward"
    return sum(out.float().square().mean() for out in outputs), STAND_IN


def _loss_candidates(output: Any) -> list[Any]:
    if isinstance(output, torch.Tensor):
        return [output]
    candidates = [getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    elif isinstance(output, Sequence) and output:
        candidates.append(output[0])
    return candidates


def _tensor_leaves(output: Any) -> list[torch.Tensor]:
    if isinstance(output, Mapping):
        output = list(output.values())
    leaves = pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def build_call(model: nn.Module, batch: int, length: int) -> Call:
    """A call made from what the model says of itself (Hugging Face models do).

    On the CPU, integers zero (a valid id everywhere), labels where it takes them.
    Raises InputError for a model that says nothing.
    """
    made = _from_config(model, batch, length)
    dummies: Any = getattr(model, "dummy_inputs", None)
    if made is None and isinstance(dummies, Mapping):
        made = dict(dummies)
    if made is None:
        raise InputError(
            f"sample_input is needed: {type(model).__name__} does not say what it "
            "takes; pass a batch, or use memscale.estimate_at_first_step"
        )
    return Call((), made, source=f"built for batch {batch}, length {length}")


def _from_config(model: nn.Module, batch: int, length: int) -> dict[str, Any] | None:
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is None or not isinstance(name, str):
        return None
    accepted = inspect.signature(model.forward).parameters
    made: dict[str, Any] = {}
    if name == "input_ids":
        limit = getattr(config, "max_position_embeddings", None)
        if isinstance(limit, int) and limit > 0 and length > limit:
            raise InputError(
                f"length must be at most the model's {limit} positions, got {length}"
            )
        made[name] = torch.zeros(batch, length, dtype=torch.long)
    elif name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        made[name] = torch.zeros(batch, channels, height, width)
    elif name == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions
        made[name] = torch.zeros(batch, config.num_mel_bins, frames)
    else:
        return None
    if "labels" in accepted:
        made["labels"] = _labels(type(model).__name__, made[name], batch, length)
    elif "start_positions" in accepted:
        made["start_positions"] = torch.zeros(batch, dtype=torch.long)
        made["end_positions"] = torch.zeros(batch, dtype=torch.long)
    elif "decoder_input_ids" in accepted:
        made["decoder_input_ids"] = torch.zeros(batch, length, dtype=torch.long)
    return made


def _labels(
    model: str, main_input: torch.Tensor, batch: int, length: int
) -> torch.Tensor:
    if "SequenceClassification" in model or "ImageClassification" in model:
        return torch.zeros(batch, dtype=torch.long)
    if main_input.dtype is torch.long:  # language modelling, token classification
        return torch.zeros_like(main_input)
    return torch.zeros(batch, length, dtype=torch.long)  # speech to text


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Tensors of what a model returns: containers, and objects with attributes."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    elif dataclasses.is_dataclass(output):
        output = list(vars(output).values())
    if not isinstance(output, list | tuple):
        return []
    return [tensor for part in output for tensor in tensors_in(part)]
