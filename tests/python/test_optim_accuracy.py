"""How near the 8-bit optimizers stay to torch's.

The limits of single steps are those that bitsandbytes publishes for its own 8-bit
blockwise optimizers (its tests/test_optim.py): sizes, steps and figures are its; 50
steps, after each of which both go on from the same place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from memscale.optim import Adam8bit, AdamW8bit, to_8bit

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = Path(__file__).parents[2] / "examples" / "data" / "alice.txt"

# Mean error and mean relative error of parameters; of the worst, atol and rtol.
LIMITS = {
    torch.float32: (6e-5, 6e-4, 1e-3, 1e-5),
    torch.float16: (6e-5, 6e-4, 1e-3, 1e-5),
    torch.bfloat16: (1.7e-4, 1.6e-3, 1e-2, 1e-4),
}


PAIRS = [
    (Adam8bit, torch.optim.Adam, 32),
    (Adam8bit, torch.optim.Adam, 1024),
    pytest.param(Adam8bit, torch.optim.Adam, 4097, marks=pytest.mark.full),
    (AdamW8bit, torch.optim.AdamW, 32),
    pytest.param(AdamW8bit, torch.optim.AdamW, 4097, marks=pytest.mark.full),
]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("ours", "theirs", "columns"), PAIRS)
def test_published_limits(ours: Any, theirs: Any, columns: int, dtype: Any) -> None:
    torch.manual_seed(0)
    p = nn.Parameter((torch.randn(1024, columns) * 0.1).to(dtype))
    q = nn.Parameter(p.detach().float())
    a, b = ours([p]), theirs([q])
    mean, relative, atol, rtol = LIMITS[dtype]
    for step in range(50):
        p.grad = (torch.randn(1024, columns) * 0.01).to(dtype)
        q.grad = p.grad.float()
        a.step()
        b.step()
        saved = a.state_dict()["state"][0]
        for name in ("exp_avg", "exp_avg_sq"):
            near = torch.isclose(b.state[q][name], saved[name], atol=3e-3, rtol=1e-3)
            assert (~near).sum() < 20
        with torch.no_grad():
            error = (q - p.float()).abs()
            assert error.mean() < mean
            assert (error / (q.abs() + 1e-9)).mean() < relative
            if step % 10 == 0:
                torch.testing.assert_close(p.float(), q, atol=atol, rtol=rtol)
            # The two part quickly; here they are kept together.
            p.copy_(q)
            q.copy_(p)
            for name in ("exp_avg", "exp_avg_sq"):
                b.state[q][name].copy_(saved[name])


def losses(steps: int, eight: bool) -> tuple[float, float]:
    """Of GPT-2 on the text, before and after; the same batches for both."""
    torch.manual_seed(0)
    text = torch.tensor(list(TEXT.read_bytes())) % 128
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128,
            n_positions=64,
            n_embd=96,
            n_layer=3,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if eight:
        assert to_8bit(optimizer) is None

    def held_out() -> float:
        with torch.no_grad():
            batch = text[-32 * 64 :].view(32, 64)
            return model(input_ids=batch, labels=batch).loss.item()

    generator = torch.Generator().manual_seed(1)
    first = held_out()
    for _ in range(steps):
        starts = torch.randint(len(text) - 33 * 64, (8,), generator=generator)
        batch = torch.stack([text[s : s + 64] for s in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if eight:
        count = sum(p.numel() for p in model.parameters())
        state = sum(
            value.numel() * value.element_size()
            for each in optimizer.state.values()
            for value in each.values()
        )
        assert state < 2.2 * count  # small tensors are at 32 bits
    return first, held_out()


@pytest.mark.parametrize("steps", [60, pytest.param(300, marks=pytest.mark.full)])
def test_training_reaches_the_same_loss(steps: int) -> None:
    first, plain = losses(steps, eight=False)
    assert plain < 0.75 * first
    _, eight = losses(steps, eight=True)
    assert eight != plain
    assert abs(eight - plain) < 0.01 * plain
