"""What the stand-in runtime tells and takes beside CUDA's own functions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch  # noqa: F401  (loads the stand-in runtime)

_library = ctypes.CDLL("libcudart.so.13")
_library.standin_unsupported_calls.restype = ctypes.c_char_p
_library.standin_end_record.restype = ctypes.c_size_t
_library.standin_used.restype = ctypes.c_size_t
_library.cudaGetErrorString.restype = ctypes.c_char_p


@dataclass(frozen=True)
class Argument:
    """Number ``index`` of a kernel whose name contains ``kernel``."""

    kernel: str
    index: int
    bytes: int


@dataclass(frozen=True)
class Launch:
    kernel: str  # demangled
    stream: int  # as torch.cuda.Stream.cuda_stream
    device: int
    argument: bytes  # if it was asked for


@dataclass
class Record:
    launches: list[Launch] = field(default_factory=list)  # when the block has ended

    def of(self, part: str) -> list[Launch]:
        return [launch for launch in self.launches if part in launch.kernel]


@contextmanager
def recorded(argument: Argument | None = None) -> Iterator[Record]:
    """The launches of the block, of all threads; blocks do not nest."""
    wanted = argument or Argument("", 0, 0)
    record = Record()
    _library.standin_begin_record(
        wanted.kernel.encode(),
        ctypes.c_size_t(wanted.index),
        ctypes.c_size_t(wanted.bytes),
    )
    try:
        yield record
    finally:
        count = _library.standin_end_record()
        record.launches = [_launch(i) for i in range(count)]


def _launch(i: int) -> Launch:
    kernel, argument = ctypes.c_char_p(), ctypes.c_void_p()
    stream, num_bytes = ctypes.c_size_t(), ctypes.c_size_t()
    device = ctypes.c_int()
    _library.standin_launch(
        ctypes.c_size_t(i),
        ctypes.byref(kernel),
        ctypes.byref(stream),
        ctypes.byref(device),
        ctypes.byref(argument),
        ctypes.byref(num_bytes),
    )
    copied = ctypes.string_at(argument, num_bytes.value) if num_bytes.value else b""
    return Launch((kernel.value or b"").decode(), stream.value, device.value, copied)


def unsupported_calls() -> dict[str, int]:
    """Functions that only answered "not supported" so far, and how often."""
    lines = _library.standin_unsupported_calls().decode().splitlines()
    return {name: int(count) for count, name in (line.split(" ") for line in lines)}


@contextmanager
def capacity(num_bytes: int) -> Iterator[None]:
    """Every card has this much memory within the block, as cudaMalloc sees it."""
    _library.standin_set_capacity(ctypes.c_size_t(num_bytes))
    try:
        yield
    finally:
        _library.standin_set_capacity(ctypes.c_size_t(0))


def used(device: int = 0) -> int:
    """Bytes that the driver has handed out: what a card runs out of."""
    return int(_library.standin_used(device))


class _LaunchConfiguration(ctypes.Structure):
    """The beginning of cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("rest", ctypes.c_size_t * 2),
    )


def launch_nothing(stream: int) -> str:
    """Launches a kernel without name; what the runtime says to it."""
    configuration = _LaunchConfiguration(stream=stream)
    error = _library.cudaLaunchKernelExC(ctypes.byref(configuration), None, None)
    _library.cudaGetLastError()
    return str(_library.cudaGetErrorString(error).decode())
