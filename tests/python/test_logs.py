"""Records of the C++ core in Python's logging."""

from __future__ import annotations

import gc
import logging
import pathlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from memscale import _C, logs
from memscale.config import Config


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    for handler in list(logs.logger.handlers):
        if isinstance(handler, logging.FileHandler):
            logs.logger.removeHandler(handler)
            handler.close()
    logs.logger.setLevel(logging.NOTSET)
    _C.set_log_threshold("info")
    logs.install()


def test_records_reach_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="memscale"):
        _C.log("info", "offload", "100% of 3 % saves")
        _C.log("error", "plan", "größer")
    assert caplog.record_tuples == [
        ("memscale.offload", logging.INFO, "100% of 3 % saves"),
        ("memscale.plan", logging.ERROR, "größer"),
    ]


def test_set_level(caplog: pytest.LogCaptureFixture) -> None:
    logs.set_level("debug")
    _C.log("debug", "x", "heard")
    logs.set_level("ERROR")
    assert _C.log_threshold() == "error"
    _C.log("warning", "x", "not heard")
    assert [record.message for record in caplog.records] == ["heard"]
    with pytest.raises(_C.ParseError, match="debug, info, warning, error"):
        logs.set_level("loud")


def test_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.log"
    handler = logs.add_file(path)
    assert logs.add_file(str(path)) is handler
    _C.log("info", "x", "written")
    handler.flush()
    assert path.read_text().endswith("memscale.x INFO written\n")


def test_configure(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.log"
    logs.configure(Config(enable_logging=False, log_file=path))
    _C.log("error", "x", "not heard")
    assert not caplog.records
    logs.configure(Config(log_file=path))
    _C.log("info", "x", "heard")
    assert "heard" in path.read_text()


def test_a_sink_that_raises_harms_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caught: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: caught.append(info))

    def bad(level: str, component: str, message: str) -> None:
        raise RuntimeError("sink")

    _C.set_log_sink(bad)
    _C.log("info", "x", "y")
    assert len(caught) == 1


def test_the_sink_is_let_go() -> None:
    class Sink:
        def __call__(self, level: str, component: str, message: str) -> None: ...

    sink = Sink()
    gone = weakref.ref(sink)
    _C.set_log_sink(sink)
    del sink
    gc.collect()
    assert gone() is not None
    _C.set_log_sink(None)
    gc.collect()
    assert gone() is None


def test_threads_log_and_replace() -> None:
    heard: list[str] = []

    def sink(level: str, component: str, message: str) -> None:
        heard.append(message)

    _C.set_log_sink(sink)

    def work() -> None:
        for i in range(200):
            _C.log("info", "x", str(i))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        _C.set_log_sink(sink)
    for thread in threads:
        thread.join()
    assert len(heard) == 800


@pytest.mark.parametrize("setup", ["", "_C.set_log_sink(lambda *r: print(r))"])
def test_interpreter_exit_with_a_sink_and_a_live_thread(setup: str) -> None:
    program = f"""
import threading, time
from memscale import _C, logs
{setup}
def work():
    while True:
        _C.log("info", "x", "y")
threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr


def test_warnings_show_without_any_set_up() -> None:
    program = "from memscale import _C; _C.log('warning', 'x', 'seen')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == "seen\n"
