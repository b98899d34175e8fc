"""Patches: a patch wraps one function of another library when that library is imported.

It is applied as soon as the target's module is imported (before or after FastGen), and `remove` restores the very same
object. The target's stand-in is a plain function: it can be pickled and copied like the target, and a compiler that
traces it sees only the target.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType
from typing import Any, TypeVar

import wrapt

from fastgen.interrupts import forkable_lock, undoing

Value = TypeVar("Value")
Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
# Examines a target before it is wrapped; returns why it must not be, or None.
Condition = Callable[[Any], str | None]
_MISSING = object()

_enabled = False
_suspended: ContextVar[bool] = ContextVar("fastgen_suspended", default=False)
# Qualified names of targets whose wrappers are used in the running call, whatever is patched.
_in_place: ContextVar[frozenset[str]] = ContextVar("fastgen_in_place", default=frozenset())


def is_active() -> bool:
    """Whether wrappers may accelerate: FastGen is enabled, or `in_place`, and this thread is not inside `suspended`."""
    return (_enabled or bool(_in_place.get())) and not is_suspended()


def is_suspended() -> bool:
    """Whether this thread is inside `suspended`."""
    return _suspended.get()


@contextlib.contextmanager
def held(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """A context in which the variable has this value for the calling thread."""
    with undoing(partial(variable.set, variable.get())):
        variable.set(value)
        yield


def suspended() -> AbstractContextManager[None]:
    """A context in which wrappers pass every call of this thread through to the original code."""
    return held(_suspended, True)


def in_place(targets: Iterable[str]) -> AbstractContextManager[None]:
    """A context in which calls of this thread use the wrappers of these targets without patches."""
    return held(_in_place, frozenset(targets))


def has(parameters: str) -> Condition:
    """Returns a condition: the target has at least these parameters, separated by spaces.

    A parameter whose name differs between releases lists all of its names, as in "cache|past_key_values".
    """

    def check(target: Any) -> str | None:
        target = getattr(target, "__func__", target)  # unwraps a static method
        found = set(inspect.signature(target).parameters)
        missing = [names for names in parameters.split() if found.isdisjoint(names.split("|"))]
        return f"{target.__qualname__} has no parameter {', '.join(sorted(missing))}" if missing else None

    return check


def takes(parameters: str, *, optional: str = "", uses: str = "") -> Condition:
    """Returns a condition: the target has exactly these parameters in this order, with or without the `optional` ones,
    and `uses` these attributes and globals.
    """
    expected = parameters.split()

    def check(target: Any) -> str | None:
        found = list(inspect.signature(target).parameters)
        if found not in (expected, [*expected, *optional.split()]):
            return f"{target.__qualname__} takes ({', '.join(found)}), expected ({', '.join(expected)})"
        missing = set(uses.split()) - names_in(target) if uses else ()
        return f"{target.__qualname__} does not use {', '.join(sorted(missing))}" if missing else None

    return check


def names_in(function: Any) -> set[str]:
    """Returns the attributes and globals that a function reads, including those of comprehensions inside it."""
    return _names(inspect.unwrap(function).__code__)


def _names(code: CodeType) -> set[str]:
    nested = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*nested)


# Maps each stand-in to its target.
_originals: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def original_of(function: Any) -> Any:
    """Returns the target that a function of another library replaces; None for the library's own function."""
    return _originals.get(function) if inspect.isfunction(function) else None


def stands_for(name: str) -> bool:
    """Whether a stand-in replaces the target of this qualified name. Others may have wrapped the stand-in since."""
    if not _enabled:
        return name in _in_place.get()
    return any(getattr(original, "__qualname__", None) == name for original in list(_originals.values()))


def _replacement(original: Any, wrapper: Wrapper, is_method: bool, inherits: Callable[[], Any] | None = None) -> Any:
    """Returns the replacement of `original`, which may be a class or static method.

    `inherits` finds a target that its class inherits from another one, where somebody may replace it for a while.
    """
    if isinstance(original, classmethod):
        return classmethod(_function(original.__func__, wrapper, binds=True))
    if isinstance(original, staticmethod):
        return staticmethod(_function(original.__func__, wrapper, binds=False))
    return _function(original, wrapper, is_method, inherits)


def _function(original: Any, wrapper: Wrapper, binds: bool, inherits: Callable[[], Any] | None = None) -> Any:
    # A closure over torch's function, if torch is imported: a compiler that traces the stand-in knows its value.
    is_compiling = getattr(getattr(sys.modules.get("torch"), "compiler", None), "is_compiling", lambda: False)
    is_traced = _is_traced

    def stand_in(*args: Any, **kwargs: Any) -> Any:  # uses no global: it gets the original's
        if is_compiling() or (binds and not args):
            return original(*args, **kwargs)
        target = original if inherits is None else inherits()
        if is_traced():
            return target(*args, **kwargs)
        if not binds:
            return wrapper(target, None, args, kwargs)
        return wrapper(target.__get__(args[0]), args[0], args[1:], kwargs)

    # TorchScript reads the source of the original, and looks its names up in the globals of the function it is given.
    scope = getattr(inspect.unwrap(original), "__globals__", stand_in.__globals__)
    call: Any = FunctionType(stand_in.__code__, scope, stand_in.__name__, None, stand_in.__closure__)
    functools.update_wrapper(call, original)
    if hasattr(original, "__wrapped__"):  # stays what its users know
        call.__wrapped__ = original.__wrapped__
    _originals[call] = original
    return call


def _beneath(target: Any) -> Any:
    """Returns the target beneath a stand-in that was left behind by a FastGen whose modules somebody has removed."""
    function = getattr(target, "__func__", target)
    code = getattr(function, "__code__", None)
    if code is None or function in _originals or (code.co_filename, code.co_name) != (__file__, "stand_in"):
        return target
    beneath = inspect.getclosurevars(function).nonlocals["original"]
    return beneath if function is target else type(target)(beneath)


def _is_traced() -> bool:
    """Whether torch.fx traces what this thread runs, or a transform of `torch.func` is active: tensors then have no
    values.
    """
    torch: Any = sys.modules.get("torch")
    try:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return True
        tracer = torch.fx._symbolic_trace
        is_tracing = getattr(tracer, "is_fx_symbolic_tracing", None)  # torch 2.10 has the flag alone, 2.15 the function
        return bool(is_tracing()) if is_tracing is not None else tracer._is_fx_tracing_flag
    except AttributeError:  # torch is not imported yet, or is another release
        return False


def bound(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments | None:
    """Returns the arguments of a call by name; None if they do not fit. The caller then calls the target itself, which
    raises: inside an exception handler, its error would show this one as its context.
    """
    try:
        return inspect.signature(target).bind(*args, **kwargs)
    except TypeError:
        return None


_PACKAGE = __file__.rpartition("patching")[0]
# On one line, which `on_behalf` sets to the caller's.
_call = lambda function, /, *args, **kwargs: function(*args, **kwargs)  # noqa: E731


def on_behalf(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a target that a wrapper calls as if the code that called the wrapper did so itself.

    A warning of the target's that names its caller then names that place, and is shown once for each such place.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    code = frame.f_code
    call = _call.__code__.replace(co_filename=code.co_filename, co_firstlineno=frame.f_lineno, co_name=code.co_name)
    return functools.partial(FunctionType(call, frame.f_globals), wrapped)


@dataclass(eq=False)
class Patch:
    """One function of another library, wrapped."""

    module: str  # holds the target: the patch waits until it is imported
    target: str  # its path inside the module, such as "GenerationMixin.generate"
    # "package.module:function", imported only when the patch is applied, so that importing FastGen stays light. Called
    # with (wrapped, instance, args, kwargs): the target, bound to the instance or class that it is a method of, if any.
    wrapper: str
    condition: Condition = lambda target: None  # what the target must look like: see `has` and `takes`
    former: str | None = None  # the target's name in other releases
    is_inherited: bool = False  # its class inherits the target from another one, which must not be changed
    # Called with the patch and the reason if it is not applied although the target's module is imported.
    on_refusal: Callable[[Patch, str], None] = lambda patch, reason: None
    state: str = "not enabled"  # or "waiting for import", "applied" or "not applied: <reason>"
    _owner: Any = field(default=None, repr=False)
    _attribute: str = field(default="", repr=False)
    _original: Any = field(default=_MISSING, repr=False)
    _installed: Any = field(default=None, repr=False)
    _found: Wrapper | None = field(default=None, repr=False)  # set by the first call, if it could not be found before

    @property
    def name(self) -> str:
        return f"{self.module}.{self.target}"

    def prepare(self) -> None:
        """Called when FastGen is enabled, before `apply`, whether the module is imported or not."""

    def apply(self) -> None:
        """Wraps the target, or records in `state` why not. Does nothing if it is already applied."""
        if self._installed is None:
            reason = self._apply()
            self.state = "applied" if reason is None else f"not applied: {reason}"
            if reason is not None:
                self.on_refusal(self, reason)

    def _apply(self) -> str | None:
        owner, attribute, original = self._look_up(self.target)
        if original is _MISSING and self.former is not None:
            owner, attribute, original = self._look_up(self.former)
        if original is _MISSING:
            return f"{self.name} does not exist in this version"
        original = _beneath(original)
        reason = self.condition(original)
        if reason is not None:
            return reason
        try:
            wrapper: Wrapper = self._find()
        except (ImportError, AttributeError) as error:
            if "partially initialized module" not in str(error):
                # The release lacks something that the wrapper needs: the user's own import must not fail because of
                # that.
                return str(error)
            # The wrapper needs a module that is being imported right now. It will be there when the wrapper is called.
            wrapper = self._find_at_call
        inherits = None
        if self.is_inherited:
            inherits = partial(getattr, super(owner, owner), attribute)
        self._installed = _replacement(original, wrapper, inspect.isclass(owner), inherits)
        self._owner, self._attribute, self._original = owner, attribute, original
        setattr(owner, attribute, self._installed)
        return None

    def _look_up(self, target: str) -> tuple[Any, str, Any]:
        """Returns where `target` is defined, its name there, and its present value or `_MISSING`."""
        *path, attribute = target.split(".")
        owner: Any = sys.modules[self.module]
        for part in path:
            owner = getattr(owner, part, None)
        if owner is not None and self.is_inherited and attribute not in vars(owner):
            return owner, attribute, getattr(owner, attribute, _MISSING)
        return owner, attribute, vars(owner).get(attribute, _MISSING) if owner is not None else _MISSING

    def _find(self) -> Any:
        """Returns the function that `wrapper` names."""
        module, _, function = self.wrapper.partition(":")
        return getattr(importlib.import_module(module), function)

    def _find_at_call(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._found is None:
            try:
                self._found = self._find()
            except (ImportError, AttributeError) as error:
                self.state = f"not applied: {error}"
                return wrapped(*args, **kwargs)
        return self._found(wrapped, instance, args, kwargs)

    def remove(self) -> None:
        """Restores the original object. A target that somebody else has wrapped since keeps that wrapper."""
        self.state = "not enabled"
        if self._installed is None:
            return
        if vars(self._owner).get(self._attribute) is self._installed:
            if self.is_inherited:
                delattr(self._owner, self._attribute)
            else:
                setattr(self._owner, self._attribute, self._original)
        else:
            # A wrapper cannot be taken out of the middle of a chain; it passes calls through (`is_active`).
            self.state = "not enabled (left in place: another library has wrapped it since)"
        self._owner, self._original, self._installed = None, _MISSING, None


_everything: PatchSet | None = None


def all_patches(make: Callable[[], list[Patch]]) -> PatchSet:
    """Returns FastGen's patches, which `make` lists; the existing ones if FastGen is imported once more."""
    global _everything
    if _everything is None:
        _everything = PatchSet(make())
    return _everything


class PatchSet:
    """All patches of FastGen, enabled and disabled together."""

    def __init__(self, patches: list[Patch]) -> None:
        self.patches = patches
        self._hooked: set[str] = set()
        self._lock = forkable_lock()

    def enable(self) -> None:
        """Applies every patch whose target is imported, and the others when their targets are."""
        global _enabled
        with self._lock:
            _enabled = True
            for patch in self.patches:
                patch.prepare()
                if patch.module not in sys.modules:
                    patch.state = "waiting for import"
                if patch.module not in self._hooked:
                    self._hooked.add(patch.module)
                    # Called immediately for a module that is already imported.
                    wrapt.register_post_import_hook(self._on_import, patch.module)
            for module in {patch.module for patch in self.patches if patch.module in sys.modules}:
                self._on_import(sys.modules[module])

    def disable(self) -> None:
        """Restores the original objects exactly."""
        global _enabled
        with self._lock:
            _enabled = False
            for patch in reversed(self.patches):
                patch.remove()

    def _on_import(self, module: Any) -> None:
        with self._lock:
            if not _enabled:
                return
            for patch in self.patches:
                if patch.module == module.__name__:
                    patch.apply()
