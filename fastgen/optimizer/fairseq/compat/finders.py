"""Patches of whole modules: finders that precede all others while FastGen is enabled; and FairSeq's configurations.

FairSeq writes `common: CommonConfig = CommonConfig()`. Since Python 3.11 a dataclass refuses an unhashable default, and
dataclasses have no hash, because they compare by value. `HashableConfigs` makes FairSeq's own, and those derived from
them, hash by identity. One module defines both their base class and the first refused class. While it runs, it gets its
own `dataclass` decorator, which no other module sees.
"""

from __future__ import annotations

import builtins
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

from fastgen.patching import Patch


@dataclass(eq=False)
class FinderPatch(Patch, MetaPathFinder):
    """A patch that finds modules itself. Removing it does not change imported modules."""

    wrapper: str = ""

    def insert(self) -> bool:
        """Puts this before the other finders; returns False if it is there already."""
        is_new = self not in sys.meta_path
        if is_new:
            sys.meta_path.insert(0, self)
        return is_new

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self.state = "not enabled"


_BASE = "FairseqDataclass"


@dataclass(eq=False)
class HashableConfigs(FinderPatch):
    """Makes FairSeq's dataclasses hashable, from the import of the module that defines the first of them.

    Existing classes keep their hash when it is removed.
    """

    module: str = "fairseq.dataclass.configs"
    target: str = _BASE

    def prepare(self) -> None:
        if self.module not in sys.modules:
            self.insert()

    def apply(self) -> None:
        made_here = "__init_subclass__" in vars(getattr(sys.modules[self.module], _BASE, object))
        self.state = "applied" if made_here else "not applied: fairseq was imported before"

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds that one module with the other finders, and makes `_Loader` run it."""
        if name != self.module:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None and hasattr(spec.loader, "get_code"):
                spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # a proxy of one
                return spec
        return None


class _Loader(wrapt.ObjectProxy):
    """The module's own loader, but `import dataclasses` yields the module `_for_configs`."""

    def exec_module(self, module: ModuleType) -> None:
        loader = module.__loader__ = self.__wrapped__
        if module.__spec__ is not None:
            module.__spec__.loader = loader
        names = vars(module)
        names["__builtins__"] = {**vars(builtins), "__import__": _import}
        try:
            exec(loader.get_code(module.__name__), names)
        finally:
            names["__builtins__"] = builtins
        # Post-import hooks use a loader of their own to find modules, which this patch may precede.
        wrapt.notify_module_loaded(module)


def _import(name: str, *args: Any, **kwargs: Any) -> ModuleType:
    module = builtins.__import__(name, *args, **kwargs)
    return _for_configs if module is dataclasses else module


def _dataclass(cls: Any = None, /, **options: Any) -> Any:
    """`dataclasses.dataclass`, except that subclasses of FairSeq's base class hash by identity."""
    if cls is None:
        return lambda cls: _dataclass(cls, **options)
    if cls.__name__ == _BASE:
        cls.__init_subclass__ = classmethod(_hash_by_identity)
    return dataclasses.dataclass(cls, **options)


def _hash_by_identity(cls: type) -> None:
    # The decorator, which runs later, does not replace an explicit hash.
    if "__hash__" not in vars(cls):
        cls.__hash__ = object.__hash__  # type: ignore[assignment]  # taken for that of an instance


_for_configs = ModuleType("dataclasses")
vars(_for_configs).update({**vars(dataclasses), "dataclass": _dataclass})
