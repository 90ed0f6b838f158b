"""Techniques on a live model, all in one way: see memscale.techniques.technique."""

from __future__ import annotations

import torch

import memscale
from replay_twins import Block

WIDTH, ROWS = 128, 256


def test_each_technique_counts_and_says_what_it_does() -> None:
    model = torch.nn.Sequential(*(Block(WIDTH) for _ in range(3)))
    memscale.wrap(model, memscale.Config(mode="aggressive", force_optimize=True))
    executor = model._memscale_executor
    assert "without a plan: layers that no plan names: block" in str(executor)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
    counts = executor.technique_stats()
    assert list(counts) == ["use_cache", "recompute", "optimizer_state"]
    assert counts["recompute"]["ops_replayed"] == executor.stats().ops_replayed > 0
    assert counts["optimizer_state"] == {"optimizers_in_8_bits": 1}
    memscale.detach(model)
    assert executor.technique_stats()["optimizer_state"] == {"optimizers_in_8_bits": 0}
