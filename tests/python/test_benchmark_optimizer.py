"""The optimizer benchmark: what it counts, and its goals."""

from __future__ import annotations

import math

import pytest
import torch

from memscale.benchmarks import optimizer
from memscale.benchmarks.optimizer_peers import CONTESTANTS, Contestant, state_bytes
from memscale.optim import AdamW8bit
from optim_cases import make_params, train

pytestmark = pytest.mark.usefixtures("one_thread")

OURS_AND_TORCHS = tuple(who for who in CONTESTANTS if who.package is None)
COUNT = 4 * 8192


def test_rows() -> None:
    rows = optimizer.measure(OURS_AND_TORCHS, COUNT + 100, rounds=2)
    row = {each["optimizer"]: each for each in rows}
    assert [*row] == ["ours 8-bit", "ours fp32", "torch fused", "torch foreach"]
    assert all(each["params"] == COUNT for each in rows)
    assert row["ours 8-bit"]["temporary_bytes"] == 0
    assert row["ours fp32"]["temporary_bytes"] == 0
    assert row["torch foreach"]["temporary_bytes"] >= 4 * COUNT
    assert row["ours 8-bit"]["state_bytes_per_param"] == pytest.approx(2.03, abs=0.01)
    assert row["torch fused"]["state_bytes_per_param"] == pytest.approx(8, abs=0.01)
    assert torch.get_num_threads() == 1
    goals = {goal.name: goal for goal in optimizer.optimizer_goals(rows)}
    assert goals["8-bit temporaries"].met
    assert math.isnan(goals["bitsandbytes' time / 8-bit"].figure)
    assert not goals["bitsandbytes' time / 8-bit"].met


def test_a_peer_that_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(params: object) -> None:
        raise OSError("no such library")

    peer = Contestant("broken", fails, "somewhere")
    rows = optimizer.measure((*OURS_AND_TORCHS, peer), COUNT, rounds=1)
    assert len(rows) == len(OURS_AND_TORCHS)
    assert (
        "broken does not run here: OSError: no such library" in capsys.readouterr().out
    )
    assert not peer.is_there()


def test_state_is_counted_once() -> None:
    ours = AdamW8bit(make_params(sizes=((4096,),)))
    train(ours, steps=1)
    assert state_bytes(ours) == 2 * 4096 + 2 * 4 * 16 + 4
    (state,) = ours.state.values()
    state["again"] = state["exp_avg_codes"].view(64, 64)
    assert state_bytes(ours) == 2 * 4096 + 2 * 4 * 16 + 4
