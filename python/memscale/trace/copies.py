"""Deep copies of what a model's code works on.

Like copy.deepcopy, but: tensors become what the caller makes of them, Python's own
containers are copied in C++, modules without the detour through pickling, and what
copy.deepcopy shares though it can change (generators of random numbers, caches of
functions, what a weak reference points to) is copied as well. One set of copies has
one memory: what was one object before is one object in the copies.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import gc
import sys
import sysconfig
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memscale._C import TraceError, copy_containers

__all__ = ["ATOMS", "CannotCopy", "Copies", "DeepCopies", "is_library"]


class CannotCopy(TraceError):
    """Something cannot be copied, so that what runs would run on the original."""


# Shared, not copied: nothing can write to them, or they are code.
ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type, range, slice),
    *(types.FunctionType, types.CodeType, types.ModuleType, types.EllipsisType),
    *(property, staticmethod, classmethod, types.NotImplementedType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)

# Shared as well: whatever is done to a lock is undone.
_LOCKS = (type(threading.Lock()), type(threading.RLock()))

# By exact type, for speed: an int that is an enum's member is no int here.
_ATOM_TYPES = frozenset(ATOMS) | frozenset(_LOCKS) | {object}

_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)

# What a module has from the start: nobody shares these with others.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

# Packages whose objects of C++, and whose functions, nobody writes to.
_LIBRARIES = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "torchao", "triton", "memscale"),
        *("transformers", "peft", "accelerate", "diffusers", "timm", "datasets"),
        *("tokenizers", "safetensors", "huggingface_hub", "deepspeed", "xformers"),
        *("lightning", "pytorch_lightning", "bitsandbytes", "flash_attn", "einops"),
        *("numpy", "scipy", "pandas", "sklearn", "numba", "jax", "opt_einsum"),
        *("matplotlib", "PIL", "tqdm", "yaml", "packaging", "typing_extensions"),
        *("pytest", "_pytest", "pluggy", "hypothesis"),
    }
)

# Parts of torch and triton whose objects are code, though not functions.
_CODE_OF = (
    *("torch._C", "torch._ops", "torch._library", "torch.library", "torch.jit"),
    *("torch.distributed", "triton"),
)

# Of a copy that takes longer than the plan is worth.
_MAX_OBJECTS = 100_000
_MAX_ARRAY_BYTES = 256 << 20


class DeepCopies(TorchFunctionMode):
    """While on, the deep copy of a tensor is what ``change`` makes of it."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            with self:  # nothing in here is a deep copy
                made = self.change(tensor)
            memo[id(tensor)] = made
            return made
        return func(*args, **(kwargs or {}))


class Copies:
    """Copies that know of each other.

    ``tensor`` makes the copy of a tensor. ``met_code`` is told of functions, and of
    classes whose instances were copied: code is shared. ``keeps_hook`` says which
    hooks of modules are copied; the rest is left out.
    """

    def __init__(
        self,
        tensor: Callable[[torch.Tensor], torch.Tensor],
        met_code: Callable[[Any], object] = lambda code: None,
        keeps_hook: Callable[[Any], bool] = lambda hook: True,
    ) -> None:
        self.memo: dict[int, Any] = {}
        self._tensor = tensor
        self._met_code = met_code
        self._keeps_hook = keeps_hook
        self._originals: list[Any] = []  # ids stay theirs
        self._num_objects = 0

    def copy(self, value: Any, what: str) -> Any:
        """The copy of ``value``; ``what`` it is, for the error."""
        # Collections would look at each new container again and again.
        collects = gc.isenabled()
        gc.disable()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # iterators cannot be copied one day
                return self._copy(value)
        except TraceError:
            raise
        except Exception as error:
            raise CannotCopy(
                f"{what} cannot be copied ({type(error).__name__}: {error}), and a "
                "trace on the original would change it"
            ) from error
        finally:
            if collects:
                gc.enable()

    def _copy(self, value: Any) -> Any:
        return copy_containers(value, self.memo, self._other)

    def _other(self, value: Any) -> Any:
        """The copy of what is none of Python's own containers."""
        kind = type(value)
        if kind in _ATOM_TYPES:
            if kind is types.FunctionType or kind is type:
                self._met_code(value)
            return value
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, type):
            self._met_code(value)
            return value
        made = self._make(value)
        self._remember(value, made)
        return made

    def _remember(self, value: Any, made: Any) -> None:
        self.memo[id(value)] = made
        self._originals.append(value)

    def _make(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, types.MethodType):
            self._met_code(value.__func__)
            return types.MethodType(value.__func__, self._copy(value.__self__))
        if isinstance(value, _BOUND):
            return self._bound(value)
        if isinstance(value, torch.Generator):
            return _generator(value)
        if isinstance(value, functools._lru_cache_wrapper):
            # Empty: nothing of ours may be found in it later.
            self._met_code(value.__wrapped__)
            if is_library(value.__module__):
                return value
            parameters: Any = value.cache_parameters()  # type: ignore[attr-defined]
            return functools.lru_cache(**parameters)(value.__wrapped__)
        if isinstance(value, weakref.ref):
            referent = value()
            if type(value) is not weakref.ref or referent is None:
                return value
            return weakref.ref(self._copy(referent))
        if isinstance(value, types.MappingProxyType):
            return types.MappingProxyType(self._copy(dict(value)))
        return self._instance(value)

    def _as_it_copies_itself(self, value: Any) -> Any:
        with DeepCopies(self._tensor):
            return copy.deepcopy(value, self.memo)

    def _bound(self, method: Any) -> Any:
        """``a_list.append`` works on the copy of the list."""
        owner = method.__self__
        if owner is None or isinstance(owner, types.ModuleType | type):
            return method
        return getattr(self._copy(owner), method.__name__)

    def _instance(self, value: Any) -> Any:
        self._num_objects += 1
        if self._num_objects > _MAX_OBJECTS:
            raise CannotCopy(f"there are more than {_MAX_OBJECTS} objects to be copied")
        if hasattr(value, "nbytes") and hasattr(value, "flags"):  # numpy's
            if not value.flags.writeable:
                return value
            if value.nbytes > _MAX_ARRAY_BYTES:
                raise CannotCopy(f"an array of {value.nbytes} bytes is not copied")
        kind = type(value)
        if kind.__module__.partition(".")[0] == "memscale":
            # What wrap attached; it knows a copy of its model when it sees one.
            return self._as_it_copies_itself(value) if _has_own_copy(kind) else value
        if kind.__module__.startswith(_CODE_OF):
            return value
        self._met_code(kind)
        _check_end(kind)
        if _has_own_copy(kind):
            return self._as_it_copies_itself(value)
        try:
            reduced = (
                copyreg.dispatch_table[kind](value)
                if kind in copyreg.dispatch_table
                else value.__reduce_ex__(4)
            )
        except TypeError:
            if callable(value) and is_library(kind.__module__):
                return value  # a function of another language, most likely
            raise
        if isinstance(reduced, str):
            return value  # a global, by its name
        self._originals.append(reduced)  # made for us: the memo may know parts by id
        return self._rebuilt(value, *reduced)

    def _rebuilt(
        self,
        value: Any,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        state: Any = None,
        elements: Any = None,
        items: Any = None,
        set_state: Callable[[Any, Any], object] | None = None,
    ) -> Any:
        made = make(*(self._copy(arg) for arg in args))
        self._remember(value, made)  # before its parts, which may know it
        if state is not None:
            state = self._copy(state)
            if set_state is not None:
                set_state(made, state)
            elif hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                attributes, slots = (
                    state
                    if isinstance(state, tuple) and len(state) == 2
                    else (state, None)
                )
                if attributes is not None:
                    made.__dict__.update(attributes)
                for name, part in (slots or {}).items():
                    setattr(made, name, part)
        for element in () if elements is None else elements:
            made.append(self._copy(element))
        for key, part in () if items is None else items:
            made[self._copy(key)] = self._copy(part)
        return made

    # ---- modules ----

    def _module(self, model: nn.Module) -> nn.Module:
        """What copy.deepcopy would make, several times faster.

        Modules are the bulk of a model and mostly hold atoms, empty hooks and one
        another; only the rest is copied piece by piece.
        """
        memo = self.memo
        shells: list[tuple[nn.Module, nn.Module]] = []
        for module in model.modules():
            if id(module) in memo:
                continue
            self._met_code(type(module))
            _check_end(type(module))
            if _has_own_copy(type(module)):
                self._remember(module, self._as_it_copies_itself(module))
            else:
                shell = object.__new__(type(module))
                self._remember(module, shell)
                shells.append((module, shell))
        for module, shell in shells:
            copied = shell.__dict__
            for name, value in vars(module).items():
                if type(value) in _ATOM_TYPES:
                    copied[name] = self._other(value)
                elif name in _OF_EVERY_MODULE and not value:
                    copied[name] = type(value)()
                elif name in ("_parameters", "_buffers", "_modules"):
                    copied[name] = {
                        key: None if part is None else self._other(part)
                        for key, part in value.items()
                    }
                elif name.endswith("_hooks") and isinstance(value, dict):
                    copied[name] = type(value)(
                        (key, self._copy(hook))
                        for key, hook in value.items()
                        if self._keeps_hook(hook)
                    )
                else:
                    copied[name] = self._copy(value)
        made: nn.Module = memo[id(model)]
        return made


def _check_end(kind: type) -> None:
    """What a user's object does at its end, its copy would do to the same file."""
    if hasattr(kind, "__del__") and not is_library(kind.__module__):
        raise CannotCopy(
            f"a {kind.__qualname__} is not copied: its __del__ would run for the copy"
        )


@functools.lru_cache(maxsize=4096)
def is_library(module: Any) -> bool:
    """Whether code of this module is a library's, and not the user's."""
    if not isinstance(module, str):
        return False
    root = module.partition(".")[0]
    if root in _LIBRARIES:
        return True
    if root not in sys.stdlib_module_names:
        return False
    # A file of the user's may have the name of a module of Python.
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is None or file.startswith(sysconfig.get_path("stdlib"))


def _has_own_copy(kind: type) -> bool:
    return hasattr(kind, "__deepcopy__")


def _generator(generator: torch.Generator) -> torch.Generator:
    made = torch.Generator(device=generator.device)
    made.set_state(generator.get_state())
    return made
