"""What shows only in a process of its own: at its first backward and at its exit."""

from __future__ import annotations

import subprocess
import sys

AFTER_A_BACKWARD = """
import torch, memscale
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
x = torch.ones(4, 8)
model(x).sum().backward()
estimate = memscale.estimate(model, x, device="RTX 3090")
assert estimate.method == "static"
assert memscale.plan(model, x, device="RTX 3090").peak_bytes == estimate.peak_bytes
"""

ONE_BACKWARD = """
import torch, memscale
device = memscale.simdev.enable(memory="1GiB")
weight = torch.ones(8, 8, device=device, requires_grad=True)
for _ in range(3):
    weight.register_hook(lambda gradient: gradient * 2)
    (weight @ weight).sum().backward()
assert memscale._simdev.wait_for_backward()
"""

# The graph holds hooks of Python's, and autograd's thread is the last to let go of it:
# both threads share a processor, and that one runs only while the other waits. It is
# still at it when the program ends.
LATE = """
import os, threading, time, torch, memscale
device = memscale.simdev.enable(memory="1GiB")
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
is_let_go = threading.Event()

class Hook:
    def __call__(self, tensor):
        return tensor

    def __del__(self):
        is_let_go.set()
        time.sleep(1)

def come_last(gradient):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

weight = torch.ones(8, 8, device=device, requires_grad=True)
weight.register_hook(come_last)
with torch.autograd.graph.saved_tensors_hooks(Hook(), Hook()):
    (weight @ weight).sum().backward()
is_let_go.wait()
"""

FORKED = """
import os, torch, memscale
device = memscale.simdev.enable(memory="1GiB")
weight = torch.ones(8, 8, device=device, requires_grad=True)
(weight @ weight).sum().backward()
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""

NO_BACKWARD = """
import memscale
memscale.simdev.enable(memory="1GiB")
assert not memscale._simdev.wait_for_backward()
"""


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_ends_well(*programs: str) -> None:
    processes = [start(program) for program in programs]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output


def test_a_card_is_estimated_after_a_backward() -> None:
    assert_ends_well(AFTER_A_BACKWARD)


def test_a_short_program_ends_well() -> None:
    """Several at once: under load autograd's thread is late to let go."""
    assert_ends_well(*[ONE_BACKWARD] * 6)


def test_a_program_whose_graph_is_dropped_late_ends_well() -> None:
    """Without the wait at exit one in four ends with SIGABRT."""
    assert_ends_well(*[LATE] * 6)


def test_a_forked_child_ends_well() -> None:
    assert_ends_well(FORKED)


def test_a_program_without_a_backward_ends_well() -> None:
    assert_ends_well(NO_BACKWARD)
