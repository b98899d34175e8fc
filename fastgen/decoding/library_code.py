"""Whether a model runs only the libraries' own code, and whether its functions are still the same.

FastGen replaces code that it knows: it captures a step, replaces an operator, or skips an encoder's padding only if
everything that this code runs is in the libraries' own files. A whitelist decides, by the file that a function was
written in, because any function can be given a name or a `__module__`. Anything else that a user puts into a model, or
uses to replace a function, runs as it would without FastGen.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import wrapt
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef

from fastgen import interrupts, patching

# The libraries; and packages that they call, which compute nothing of a model.
LIBRARIES = ("torch", "transformers", "fairseq", "sentence_transformers", "peft", "accelerate", "fastgen")
_HELPERS = ("numpy", "huggingface_hub", "packaging", "tqdm", "typing_extensions", "wrapt")
# wrapt 2 derives its wrappers of functions from this class, wrapt 1 from `ObjectProxy`.
_PROXY = getattr(wrapt, "BaseObjectProxy", wrapt.ObjectProxy)
_PACKAGES = (*LIBRARIES, *_HELPERS)
_STANDARD = os.path.dirname(os.__file__) + os.sep
# Code whose functions are followed: what they call is watched, too. Of torch, only its modules and their functions.
_FOLLOWED = ("transformers", "fairseq", "sentence_transformers", "peft", "torch.nn", "fastgen.models")

# What a subclass of a library's class may have without changing its forward pass.
_HARMLESS = frozenset(
    "__module__ __doc__ __qualname__ __init__ __annotations__ __annotate_func__ __annotations_cache__ __firstlineno__ "
    "__static_attributes__ __parameters__ __orig_bases__ __abstractmethods__ _abc_impl config_class".split()
)
# Methods that users call, but no forward pass does.
_ENTRY_POINTS = frozenset({"encode", "from_pretrained", "generate", "save_pretrained"})
# Attributes that prefills write to a module, and no step reads if it is given positions (`models.notes_positions`).
NOTED_BY_PREFILL = frozenset({"rope_deltas"})
# A hook that the library leaves on a model after hidden states or attentions were requested, and the flag that it sets.
_CAPTURING_HOOK, _HAS_CAPTURING_HOOKS = "output_capturing_hook", "_output_capturing_hooks_installed"
# Methods through which torch runs a module.
_ENTRIES = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__"})
_METHODS = (FunctionType, staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
_ATOMS = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))
_COMPILED = "_torchdynamo_orig_callable"  # an attribute of what torch.compile returns
# Number of kinds of models whose reached functions are cached.
_MODELS = 64


# ---- where code comes from


@functools.cache
def _place(path: str) -> str | None:
    """Returns the package that a file belongs to, such as `torch.nn`; None if it is not one of the libraries' files."""
    for package in _PACKAGES:
        file = getattr(sys.modules.get(package), "__file__", None)
        folder = os.path.dirname(file) + os.sep if file else None
        if folder and path.startswith(folder):
            inside, _, below = path[len(folder) :].partition(os.sep)
            return f"{package}.{inside}" if below else package
    is_standard = path.startswith(_STANDARD) and "site-packages" not in path and "dist-packages" not in path
    return "standard" if is_standard or path.startswith("<frozen ") else None


def _place_of(function: FunctionType) -> str | None:
    path = function.__code__.co_filename
    if not path.startswith("<") or path.startswith("<frozen "):
        return _place(path)
    # A function made from a string, such as a dataclass method, belongs to the file of the module of its globals.
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    is_of_module = module is not None and vars(module) is function.__globals__
    return _place(getattr(module, "__file__", None) or "") if is_of_module else None


def is_own(value: Any) -> bool:
    """Whether a callable or a type is the libraries' own, including everything that it keeps to call.

    The check goes by its exact type, because a proxy claims to be of any class.
    """
    try:
        return _is_own(value, set())
    except Exception as error:  # an object that answers every question in its own way is not one of the libraries'
        interrupts.pass_on(error)
        return False


def _is_own(value: Any, seen: set[int]) -> bool:
    if id(value) in seen:
        return True
    seen.add(id(value))
    kind = type(value)
    if kind is FunctionType:
        return _place_of(value) is not None and all(_is_own(part, seen) for part in _kept(value))
    if issubclass(kind, type):
        return _is_of_package(value.__module__)
    if issubclass(kind, _PROXY):
        parts = [getattr(value, "_self_wrapper", None) or kind, value.__wrapped__]
        return _is_of_package(kind.__module__) and all(_is_own(part, seen) for part in parts)
    parts = list(_parts(value))
    return (bool(parts) or _is_of_package(_module_of(value))) and all(_is_own(part, seen) for part in parts)


def _kept(function: FunctionType) -> Iterator[Any]:
    """Iterates over callables that a function keeps: closure variables, what it decorates, what FastGen replaced."""
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a variable without a value
            continue
        if callable(value):
            yield value
    for value in (vars(function).get("__wrapped__"), patching.original_of(function)):
        if value is not None:
            yield value


def _parts(value: Any) -> Iterator[Any]:
    """Iterates over the functions that anything but a function or a type consists of."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (each for each in (value.fget, value.fset, value.fdel) if each is not None)
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, (functools.partial, functools.partialmethod)):
        yield value.func
        yield from (each for each in (*value.args, *value.keywords.values()) if callable(each))
    elif isinstance(value, CustomOpDef):
        yield value._init_fn
    elif not isinstance(value, nn.Module):
        own = getattr(value, "__dict__", {})
        yield from (own[name] for name in ("__wrapped__", "_torchdynamo_inline") if name in own)


def _module_of(value: Any) -> str:
    """Returns the module of a C function; for an object, the module of its type."""
    name = None if hasattr(value, "__dict__") else getattr(value, "__module__", None)
    if isinstance(name, str):
        return name
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    if isinstance(owner, ModuleType):
        return owner.__name__
    return (owner if isinstance(owner, type) else type(value if owner is None else owner)).__module__


@functools.cache
def _is_of_package(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _PACKAGES or (root in sys.stdlib_module_names and root != "unittest")  # a mock is user code


def is_of_library(value: Any) -> bool:
    """Whether code that runs beside or instead of a forward pass is a library's. Python's own does not qualify."""
    return _package_of(value) in LIBRARIES and is_own(value)


def _package_of(value: Any) -> str:
    """Returns the package of a function, method or partial; for anything else, that of its type."""
    while isinstance(value, (functools.partial, MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    place = _place_of(value) if isinstance(value, FunctionType) else _module_of(value)
    return (place or "").partition(".")[0]


def is_own_class(kind: type) -> bool:
    """Whether the forward pass of a class is a library's own: the class is, or only adds what the pass cannot call.

    Its functions are checked elsewhere (`Reached`), because they may be replaced.
    """
    added = {name for base in kind.__mro__ if not is_own(base) for name in vars(base).keys() - _HARMLESS}
    return not added or (not any(map(_is_special, added)) and added.isdisjoint(_known_to_bases(kind)))


def _is_special(name: str) -> bool:
    """Whether Python, or torch's modules, look up a name by themselves."""
    return name.startswith("__") and name.endswith("__")


def _known_to_bases(kind: type) -> set[str]:
    """Returns the attributes of the library classes among a class's bases, and the names in their code."""
    known: set[str] = set()
    for base in filter(is_own, kind.__mro__):
        for name, value in vars(base).items():
            known.add(name)
            for part in (value, *_parts(value)):
                known |= _named(part.__code__) if isinstance(part, FunctionType) else set()
    return known - _ENTRY_POINTS


# ---- functions that the forward passes of a model run


def are_the_same(now: list[Any], before: list[Any]) -> bool:
    """Whether the objects are identical. Equality is not enough: a proxy equals what it wraps."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


class Reached:
    """The functions that the forward passes of some classes reach: their methods, functions of their modules, and
    torch's functions. A method of any of these classes counts as called if its name occurs in the code.

    Attributes:
        names: all names in their code: an attribute of another name has no effect.
        foreign: a function that is not one of the libraries'; None if there is none.
        functions: all of them, to be compared with those of another time.
    """

    _of: OrderedDict[frozenset[type], Reached] = OrderedDict()

    def __init__(self, kinds: Iterable[type]) -> None:
        self.names: set[str] = set(_ENTRIES)
        self._classes: dict[type, None] = {}  # the libraries' own
        self._derived: dict[type, None] = {}  # the user's, which may get a method later
        self._modules: dict[int, ModuleType] = {id(each): each for each in (torch, F)}
        self._globals: dict[int, dict[str, Any]] = {}
        self._visited: dict[FunctionType, None] = {}
        for kind in kinds:
            self._add_class(kind)
        self._follow()
        for kind in kinds:  # attributes that a constructor sets count, whoever reads them
            for base in kind.__mro__:
                constructor = vars(base).get("__init__")
                if isinstance(constructor, FunctionType) and self._is_followed(constructor):
                    self.names |= _named(constructor.__code__)
        self.names -= {*NOTED_BY_PREFILL, _HAS_CAPTURING_HOOKS}
        self._settle()

    @classmethod
    def of(cls, model: nn.Module) -> Reached:
        """Returns what a model reaches now. Results are cached if all classes and functions are the libraries' own."""
        kinds = frozenset(map(type, modules_of(model)))
        found = cls._of.get(kinds)
        if found is None or not found.hold():
            found = cls(kinds)
            if found.foreign is None and all(map(is_own_class, kinds)):
                cls._of[kinds] = found
                while len(cls._of) > _MODELS:
                    cls._of.popitem(last=False)
        return found

    def hold(self) -> bool:
        """Whether none of the functions has been replaced since."""
        try:
            names, values = self._read()
        except RuntimeError:  # another thread has changed a namespace meanwhile
            return False
        return names == self._before[0] and are_the_same(values, self._before[1])

    def _read(self) -> tuple[list[str], list[Any]]:
        """Returns all names in the classes, and what these and the watched names of other namespaces are."""
        names: list[str] = []
        values: list[Any] = []
        # All of Tensor takes less time than the names in it that are watched.
        for kind in (*self._classes, *self._derived, Tensor):
            names += vars(kind)
            values += vars(kind).values()
        for scope, watched in self._scopes:
            values += map(scope.get, watched)
        return names, values

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__[:-1]:  # without `object`
            (self._classes if _is_of_package(base.__module__) else self._derived)[base] = None

    def _is_followed(self, function: FunctionType) -> bool:
        place = _place_of(function)
        return place is not None and (place in _FOLLOWED or place.partition(".")[0] in _FOLLOWED)

    def _follow(self) -> None:
        """Continues until no name is new, because each new name may be that of another method."""
        known = -1
        while known != (known := len(self.names) + len(self._classes) + len(self._visited)):
            for kind in list(self._classes):
                for name in self.names.intersection(vars(kind)):
                    self._visit(vars(kind)[name])

    def _visit(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, (*_METHODS, MethodType, functools.partial)):
            for part in _parts(value):
                self._visit(part)

    def _visit_function(self, function: FunctionType) -> None:
        if function in self._visited:
            return
        self._visited[function] = None
        if self._is_followed(function):
            names, scope = _named(function.__code__), function.__globals__
            self.names |= names
            self._globals[id(scope)] = scope
            for name in names.intersection(scope):
                self._reach(scope[name])
        for part in _kept(function):
            self._visit(part)

    def _reach(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, ModuleType):
            if value.__name__.partition(".")[0] in LIBRARIES:
                self._modules[id(value)] = value
        elif isinstance(value, type) and value.__module__.startswith(("transformers.cache_utils", "fairseq.")):
            self._add_class(value)

    def _settle(self) -> None:
        """Notes the present functions, and looks for one that is not the libraries' own."""
        scopes: list[Mapping[str, Any]] = [vars(module) for module in self._modules.values()]
        scopes += [scope for scope in self._globals.values() if not any(scope is each for each in scopes)]
        self._scopes = [(scope, sorted(self.names.intersection(scope))) for scope in scopes]
        self._before = self._read()
        found = [(kind.__name__, name, each) for kind in self._classes for name, each in vars(kind).items()]
        found = [each for each in found if isinstance(each[2], _METHODS) or each[1] in self.names]
        for scope, names in (*self._scopes, (vars(Tensor), sorted(self.names))):
            found += [(scope.get("__name__", "Tensor"), name, scope.get(name)) for name in names]
        self.foreign = next((f"{where}.{name}" for where, name, each in found if _is_foreign(each)), None)
        self.functions = tuple([each if isinstance(each, _ATOMS) else id(each) for *_, each in found])


def _is_foreign(value: Any) -> bool:
    kind = type(value)
    return (callable(value) or kind in _METHODS or hasattr(kind, "__get__")) and not is_own(value)


@functools.cache
def _named(code: CodeType) -> frozenset[str]:
    """Returns the names in code: globals, attributes, and strings that may be looked up as attributes."""
    words = [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]
    inside = [_named(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(words, *inside)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of `model.modules()` in another order. Several times as fast, as it computes no names."""
    found: dict[nn.Module, None] = {model: None}
    left = [model]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return list(found)


def foreign(model: nn.Module) -> str | None:
    """Returns why a model's forward pass runs more than the libraries' own code; None if it does not."""
    modules = modules_of(model)
    for kind in dict.fromkeys(map(type, modules)):  # first, so that the functions of such a class are not followed
        if not is_own_class(kind):
            return f"a class that is none of the libraries' ({kind.__name__})"
    reached = Reached.of(model)
    if reached.foreign is not None:
        return f"a function has been replaced ({reached.foreign})"
    return next(filter(None, (_foreign_part(module, reached.names) for module in modules)), None)


def _foreign_part(module: nn.Module, names: set[str]) -> str | None:
    own, kind = vars(module), type(module).__name__
    replaced = [own[name] for name in ("forward", "_old_forward") if name in own]
    if not all(map(is_of_library, replaced)) or not _is_hook_own(own.get("_hf_hook")):
        return f"forward has been replaced ({kind})"
    if is_compiled(module):
        return f"a part of the model is compiled ({kind})"
    if has_foreign_hooks(module):
        return f"forward hooks are registered on the model ({kind})"
    for name, value in own.items():
        if type(value) in _ATOMS or name in _OF_TORCH or name not in names:
            continue
        for each in _inside(value):
            if not isinstance(each, (nn.Module, type)) and callable(each) and not is_own(each):
                return f"{kind}.{name} is none of the libraries'"
    return None


def is_in_training(module: nn.Module) -> bool:
    """Whether a module is in training mode, and may compute something else in it.

    Any module may, except torch's own whose code does not name the mode. peft's `add_adapter` and torch's
    `quantize_dynamic` leave new layers in training mode in a model that is in evaluation mode. A hook may ask for the
    mode, as that of `spectral_norm` does.
    """
    if not module.training:
        return False
    kind: Any = type(module)
    return bool(module._forward_pre_hooks or module._forward_hooks) or _names_training(kind, kind.forward)


@functools.cache
def _names_training(kind: type, forward: Any) -> bool:
    """Whether the code of a class may ask for the mode, given its forward pass, which may have been replaced."""
    if not (isinstance(forward, FunctionType) and _package_of(forward) == "torch" and is_own(forward)):
        return True
    own = [value for base in kind.__mro__ if base not in (nn.Module, object) for value in vars(base).values()]
    parts = [part for value in (forward, *own) for part in (value, *_parts(value)) if isinstance(part, FunctionType)]
    return any("training" in _named(part.__code__) for part in parts)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch compiles this module: through `module.compile()`, or as a result of `torch.compile`."""
    own = vars(module)
    if own.get("_compiled_call_impl") is not None or _COMPILED in own:
        return True
    return "forward" in own and _COMPILED in getattr(own["forward"], "__dict__", ())


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a forward hook is not one of the libraries'."""
    hooks = module._forward_hooks, module._forward_pre_hooks
    return any(hooks) and not all(is_of_library(hook) for each in hooks for hook in each.values())


def without_capturing(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """Returns the hooks without the library's hooks that capture outputs: they have no effect unless a caller has
    requested outputs.
    """
    return {n: hook for n, hook in hooks.items() if not (_is_capturing(hook) and is_of_library(hook))}


def _is_capturing(hook: Any) -> bool:
    return type(hook) is FunctionType and hook.__code__.co_name == _CAPTURING_HOOK


def row_hooks(module: nn.Module) -> list[int]:
    """Returns hooks through which peft passes a module something for each row of the batch, as `adapter_names`."""
    return [number for number, hook in module._forward_pre_hooks.items() if _package_of(hook) == "peft"]


def _is_hook_own(hook: Any) -> bool:
    """Whether a hook of accelerate's, which it calls around a forward pass, is its own code, or there is no hook."""
    inside = getattr(hook, "hooks", ())
    return hook is None or (type(hook).__module__.startswith("accelerate.") and all(map(_is_hook_own, inside)))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)
