"""Patches of whole modules: finders that precede all others while FastGen is enabled."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.abc import MetaPathFinder

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
