"""Patches of whole modules: finders that stand before all others while FastGen is enabled."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from typing import ClassVar

from fastgen.patching import Patch


@dataclass(eq=False)
class FinderPatch(Patch):
    """A patch that finds modules itself. Modules that are imported already stay as they are when it is removed."""

    wrapper: str = ""
    finder: ClassVar[MetaPathFinder]

    def insert(self) -> bool:
        """Puts the finder before the others; False if it is there already."""
        is_new = self.finder not in sys.meta_path
        if is_new:
            sys.meta_path.insert(0, self.finder)
        return is_new

    def remove(self) -> None:
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.state = "not enabled"
