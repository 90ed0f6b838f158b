"""Random states: as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["same_randomness"]


@contextmanager
def same_randomness() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the generators are as before after it.

    Those of Python, of numpy if it is in use, of torch on the CPU and on the
    current accelerator if that has been used.
    """
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        accelerator = torch.accelerator.current_accelerator()
        if (
            accelerator is not None
            and torch.get_device_module(accelerator).is_initialized()
        ):
            stack.enter_context(
                torch.random.fork_rng(
                    devices=range(torch.accelerator.device_count()),
                    device_type=accelerator.type,
                )
            )
        else:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        yield
