"""Code that runs on copies: of its arguments, and of all it finds by name.

A shell of a model shares its code with the model, and code reaches what belongs to
no module: a list of losses in a global variable, a counter in a class, a generator
of random numbers in a closure. While ``Untouched`` is on, these names stand for
copies; afterwards they stand for what they stood for. So a trace leaves nothing
behind, and does not go on from where another left.

What counts is what the code names: global variables, attributes of modules that it
names, closures, default arguments, attributes of classes and functions. It is read
from bytecode, from forward on, wherever names lead. Libraries are not read: they keep
no state that steps change, with few exceptions, which ``remove_fakes`` finds.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.nn.modules import module as torch_module

from memscale.trace.copies import ATOMS, CannotCopy, Copies, is_library

__all__ = ["Untouched"]

# Called by torch, or by whoever traces, though no code says so.
_CALLED = frozenset(
    {"forward", "train", "backward", "setup_context", "jvp", "vjp", "step"}
)

_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})

_MISSING: Any = object()


class Untouched:
    """Swaps what code names for copies. One at a time; not for reuse."""

    def __init__(self) -> None:
        self._copies: Copies | None = None
        self._code: list[Any] = []  # functions and classes to be read
        self._read: dict[int, Any] = {}
        self._names: set[str] = set(_CALLED)  # attributes that code may ask for
        self._classes: list[type] = []
        self._modules: list[types.ModuleType] = []
        self._slots: dict[tuple[int, Any], None] = {}
        # Puts a copy where it belongs; puts back what was there.
        self._swaps: list[Callable[[], object]] = []
        self._restores: list[Callable[[], object]] = []

    def met_code(self, code: Any) -> None:
        """A function or a class that what runs may call."""
        if id(code) not in self._read:
            self._read[id(code)] = code
            self._code.append(code)

    @contextmanager
    def on(self, copies: Copies) -> Iterator[None]:
        """Names stand for copies. Raises CannotCopy if something cannot be copied."""
        self._copies = copies
        for hooks in (
            torch_module._global_forward_pre_hooks,
            torch_module._global_forward_hooks,
        ):
            for hook in hooks.values():
                self._value(hook, "a hook of all modules")
        self._read_all()
        if self._swaps and _others_run():
            raise CannotCopy(
                "other threads run, which would see the copies that names stand for "
                "while a step is traced"
            )
        try:
            with ExitStack() as restored:  # all of it, whatever comes
                for restore in self._restores:
                    restored.callback(restore)
                for swap in self._swaps:
                    swap()
                yield
        finally:
            # Copies know of this: no cycle keeps them.
            self._copies = None
            self._swaps.clear()
            self._restores.clear()

    # ---- reading ----

    def _read_all(self) -> None:
        """Until there is nothing new: each function names others."""
        known = -1
        while self._code or known != len(self._names):
            known = len(self._names)
            while self._code:
                code = self._code.pop()
                if isinstance(code, types.FunctionType):
                    self._function(code)
                elif isinstance(code, type):
                    self._class(code)
            for kind in self._classes:
                self._members(kind)
            for module in self._modules:
                self._attributes(module)

    def _function(self, function: types.FunctionType) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            self.met_code(wrapped)
        if is_library(function.__globals__.get("__name__")):
            # A decorator, maybe: what it decorates is the user's.
            for cell in function.__closure__ or ():
                value = _contents(cell)
                if isinstance(value, types.FunctionType | type):
                    self.met_code(value)
            return
        global_names, names = _names_in(function.__code__)
        self._names |= names
        namespace = function.__globals__
        for name in global_names:
            if name in namespace or not hasattr(builtins, name):
                self._slot_of_dict(namespace, name, f"the global variable {name!r}")
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._cell(name, cell)
        self._defaults(function)
        self._restores.append(_without_new_names(function))
        for name in list(function.__dict__):
            if name != "__wrapped__":
                self._slot_of_dict(
                    function.__dict__, name, f"{function.__qualname__}.{name}"
                )

    def _class(self, kind: type) -> None:
        if issubclass(kind, enum.Enum):
            return
        users = [base for base in kind.__mro__ if not is_library(base.__module__)]
        for base in users:
            if base not in self._classes:
                self._classes.append(base)
                self._restores.append(_without_new_names(base))
        # Whatever the user's class overrides of a library may be called by it; of
        # torch's modules it is known what is.
        for base in set(kind.__mro__).difference(users) if users else ():
            if base.__module__.partition(".")[0] not in ("torch", "builtins"):
                self._names |= vars(base).keys()

    def _members(self, kind: type) -> None:
        for name, value in list(vars(kind).items()):
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            is_called = name in self._names or _is_dunder(name)
            if isinstance(value, types.FunctionType):
                if is_called:
                    self.met_code(value)
            elif isinstance(value, property):
                for part in (value.fget, value.fset, value.fdel):
                    if is_called and part is not None:
                        self._value(part, name)
            elif isinstance(value, functools.cached_property):
                if is_called:
                    self._value(value.func, name)
            elif is_called and not _is_dunder(name) and not _is_descriptor(value):
                self._slot_of_class(kind, name)

    def _attributes(self, module: types.ModuleType) -> None:
        for name in self._names & vars(module).keys():
            self._slot_of_dict(vars(module), name, f"{module.__name__}.{name}")

    # ---- slots: where a name stands for something ----

    def _is_new(self, owner: Any, name: Any) -> bool:
        key = id(owner), name
        if key in self._slots:
            return False
        self._slots[key] = None
        return True

    def _value(self, value: Any, what: str) -> Any:
        """The copy of what a name stands for; itself where nothing can change."""
        if isinstance(value, types.ModuleType):
            if not is_library(value.__name__) and value not in self._modules:
                self._modules.append(value)
            return value
        if isinstance(value, types.FunctionType | type):
            self.met_code(value)
            return value
        if isinstance(value, ATOMS):
            return value
        assert self._copies is not None
        return self._copies.copy(value, what)

    def _slot_of_dict(self, owner: dict[str, Any], name: str, what: str) -> None:
        if not self._is_new(owner, name):
            return
        before = owner.get(name, _MISSING)
        made = before if before is _MISSING else self._value(before, what)

        def restore() -> None:
            if before is _MISSING:
                owner.pop(name, None)
            elif owner.get(name, _MISSING) is not before:
                owner[name] = before

        self._restores.append(restore)
        if made is not before:
            self._swaps.append(functools.partial(owner.__setitem__, name, made))

    def _slot_of_class(self, kind: type, name: str) -> None:
        if not self._is_new(kind, name):
            return
        before = vars(kind)[name]
        made = self._value(before, f"{kind.__qualname__}.{name}")

        def restore() -> None:
            if vars(kind).get(name, _MISSING) is not before:
                type.__setattr__(kind, name, before)

        self._restores.append(restore)
        if made is not before:
            self._swaps.append(functools.partial(type.__setattr__, kind, name, made))

    def _cell(self, name: str, cell: types.CellType) -> None:
        if not self._is_new(cell, None):
            return
        before = _contents(cell)
        made = before
        if before is not _MISSING:
            made = self._value(before, f"{name!r} of a closure")

        def restore() -> None:
            if before is not _MISSING:
                cell.cell_contents = before
            elif _contents(cell) is not _MISSING:
                del cell.cell_contents

        self._restores.append(restore)
        if made is not before:
            self._swaps.append(functools.partial(_fill, cell, made))

    def _defaults(self, function: types.FunctionType) -> None:
        what = f"a default argument of {function.__qualname__}"
        for attribute in ("__defaults__", "__kwdefaults__"):
            before = getattr(function, attribute)
            made = before and self._value(before, what)
            if made is not before:
                self._restores.append(
                    functools.partial(setattr, function, attribute, before)
                )
                self._swaps.append(
                    functools.partial(setattr, function, attribute, made)
                )


def _without_new_names(owner: Any) -> Callable[[], None]:
    """Takes attributes away from a class or function that were not there before."""
    before = set(vars(owner))

    def restore() -> None:
        for name in set(vars(owner)) - before:
            if not _is_dunder(name):
                delattr(owner, name)

    return restore


def _fill(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: a name that was not bound yet
        return _MISSING


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_descriptor(value: Any) -> bool:
    """Of a slot, a named tuple's field and the like: what they give is elsewhere."""
    kind = type(value)
    return hasattr(kind, "__get__") and is_library(kind.__module__)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names of global variables; and all that may be names of attributes."""
    global_names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in _GLOBAL_OPS
    }
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_globals, inner = _names_in(constant)
            global_names |= inner_globals
            names |= inner
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)  # getattr(self, "name")
    return frozenset(global_names), frozenset(names)


def _others_run() -> bool:
    """Whether there are threads that may be the user's own; libraries' are daemons."""
    this = threading.current_thread()
    return any(not t.daemon and t is not this for t in threading.enumerate())
