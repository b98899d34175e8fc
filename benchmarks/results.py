"""Writes results.json, and the table made from it, atomically."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.record import Record

_SCHEMA = 1
_MEMORY_OF_SYSTEM = 0.25  # GiB


class Results:
    """The records of one machine with one set of versions, in a folder of their own.

    A record replaces that of the same workload, so that a run of a few workloads keeps the others. Results of another
    machine, other versions or other settings are moved to results.previous.json.

    Args:
        folder: gets results.json and results.md.
        about: {"machine": ..., "versions": ..., "settings": ...}: the common properties of the records.
        order: names of the workloads, in the order of the table; removed workloads come last.
    """

    def __init__(self, folder: Path, about: dict[str, Any], order: list[str]) -> None:
        self.folder, self.path = folder, folder / "results.json"
        self.about = about
        self.records: dict[str, Record] = {}
        self._order = {name: place for place, name in enumerate(order)}
        if self.path.exists():
            try:
                found = json.loads(self.path.read_text(encoding="utf-8"))
                if found["schema"] == _SCHEMA and all(_are_same(found[key], value) for key, value in about.items()):
                    self.records = {data["name"]: Record.from_json(data) for data in found["workloads"]}
                    return
            except (ValueError, KeyError, TypeError):
                pass
            self.path.replace(folder / "results.previous.json")

    def add(self, record: Record) -> None:
        """Adds a record and writes results.json and results.md."""
        self.records[record.name] = record
        last = len(self._order)
        records = sorted(self.records.values(), key=lambda each: (self._order.get(each.name, last), each.name))
        self.folder.mkdir(parents=True, exist_ok=True)
        found = {"schema": _SCHEMA, **self.about, "workloads": [each.to_json() for each in records]}
        write_whole(self.path, (json.dumps(found, indent=1) + "\n").encode())
        write_whole(self.folder / "results.md", tables.markdown(self.about, records).encode())


def _are_same(found: dict[str, Any], now: dict[str, Any]) -> bool:
    """Returns whether both are equal. The system reserves a different part of the memory at each start."""
    sizes = [each.get("memory_gib", 0) for each in (found, now)]
    return {**found, "memory_gib": 0} == {**now, "memory_gib": 0} and abs(sizes[0] - sizes[1]) <= _MEMORY_OF_SYSTEM


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file atomically: an interruption leaves the old one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            # Temporary files are readable only by their owner.
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
