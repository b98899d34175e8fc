"""What `fastgen.status()` returns: versions, patches, operators."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, field
from importlib import metadata

from fastgen import ops, patching, settings
from fastgen._version import __version__
from fastgen.optimizer.transformers import TESTED_VERSIONS
from fastgen.patching import PatchSet


@dataclass(frozen=True)
class Status:
    """A snapshot of what FastGen has changed in this process. `print(fastgen.status())` gives a table.

    Attributes:
        enabled: whether calls are accelerated in this thread.
        strict: whether a fallback raises.
        versions: {"fastgen": ..., "python": ..., "torch": ..., "transformers": ...}; "not installed" where missing.
        patches: {target: "applied", "waiting for import", "not enabled" or "not applied: <reason>"}.
        operators: {operator: which backend serves it}.
        notes: anything the user should know, such as an untested version.
    """

    enabled: bool
    strict: bool
    versions: dict[str, str]
    patches: dict[str, str]
    operators: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        switch = "enabled" if self.enabled else "disabled"
        lines = [f"FastGen {self.versions['fastgen']}: {switch}{', strict' if self.strict else ''}"]
        for title, rows in (("versions", self.versions), ("patches", self.patches), ("operators", self.operators)):
            width = max(map(len, rows))
            lines += ["", f"{title}:", *(f"  {name:<{width}}  {value}" for name, value in rows.items())]
        if self.notes:
            lines += ["", "notes:", *(f"  {note}" for note in self.notes)]
        return "\n".join(lines)


def collect(patches: PatchSet) -> Status:
    """The status of this process. Imports torch, for the operators; never a toolkit."""
    versions = {"fastgen": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in ("torch", "transformers")}
    return Status(
        enabled=patching.is_active(),
        strict=settings.current().strict,
        versions=versions,
        patches={patch.name: patch.state for patch in patches.patches},
        operators=ops.backends(),
        notes=_notes(versions["transformers"]),
    )


def _version(package: str) -> str:
    # A toolkit that is imported is asked itself: it need not be the one that is installed.
    imported = getattr(sys.modules.get(package), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _notes(transformers: str) -> list[str]:
    first, last = (_release(version) for version in TESTED_VERSIONS)
    if transformers == "not installed" or first <= _release(transformers) <= last:
        return []
    return [f"transformers {transformers} is outside the tested range {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[1]}"]


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
