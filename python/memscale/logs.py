"""MemScale's log: records of the C++ core go to Python's ``logging``.

A record of the component "offload" reaches the logger ``memscale.offload``, so
the usual ways to filter, format and silence apply.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable

from memscale import _C

__all__ = ["add_file", "configure", "install", "logger", "set_level", "use"]

# No handler on import: where the program sets up no logging, Python's last resort
# still shows our warnings on stderr. wrap() adds one, see configure().
logger = logging.getLogger("memscale")

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def _sink(level: str, component: str, message: str) -> None:
    # The message is final: no arguments, so that a "%" in it stays one.
    logger.getChild(component).log(_LEVELS[level], "%s", message)


def _silence(level: str, component: str, message: str) -> None:
    pass


def install() -> None:
    """Route the records of the C++ core to ``logging``; done on import."""
    _C.set_log_sink(_sink)


def configure(config: _C.Config) -> None:
    """Do what ``enable_logging`` and ``log_file`` of the config say.

    A program that sets up no logging sees the log on stderr.
    """
    if not config.enable_logging:
        _C.set_log_sink(_silence)
        return
    install()
    if logger.level == logging.NOTSET:
        set_level("info")
    if not logger.hasHandlers():
        logger.addHandler(_Terminal())
    if config.log_file is not None:
        add_file(config.log_file)


# Handlers that were added for a config's log_file, by the models that write there.
_log_files: Counter[logging.Handler] = Counter()


def use(config: _C.Config) -> Callable[[], None] | None:
    """``configure`` for a wrapped model; what undoes it, if something has to."""
    before = list(logger.handlers)
    configure(config)
    if not config.enable_logging:
        return install
    if config.log_file is None:
        return None
    handler = add_file(config.log_file)
    if handler in before and not _log_files[handler]:
        return None  # one that the user added is the user's
    _log_files[handler] += 1
    return lambda: _let_go_of(handler)


def _let_go_of(handler: logging.Handler) -> None:
    _log_files[handler] -= 1
    if _log_files[handler] == 0:
        del _log_files[handler]
        logger.removeHandler(handler)
        handler.close()


class _Terminal(logging.Handler):
    """Messages as they are, to what stderr is at the moment.

    Silent once the program sets up logging of its own.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(record.getMessage(), file=sys.stderr)


def set_level(level: str) -> None:
    """Let records from ``level`` on ("debug", "info", "warning", "error") pass.

    It sets the level of the logger ``memscale`` and the core's own threshold:
    what is below costs nothing.
    """
    _C.set_log_threshold(level)
    logger.setLevel(_LEVELS[_C.log_threshold()])


def add_file(path: str | os.PathLike[str]) -> logging.Handler:
    """Write the log to ``path`` as well; the same file is added only once.

    Returns the handler, to be given to ``logger.removeHandler`` and closed.
    """
    name = os.path.abspath(path)
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == name:
            return handler
    added = logging.FileHandler(name, delay=True, encoding="utf-8")
    added.setFormatter(
        logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    )
    logger.addHandler(added)
    if logger.level == logging.NOTSET:
        set_level("info")
    return added


install()
