"""results.json, and the table made from it. All are written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.record import Record

SCHEMA = 1
_MEMORY_OF_SYSTEM = 0.25  # GiB


class Results:
    """The records of one machine with one set of versions, in a folder of their own.

    A record replaces that of the same workload, so a run of a few workloads leaves the others in place. Results of
    another machine, other versions or other settings are not mixed in: they are moved to results.previous.json.

    Args:
        folder: gets results.json and results.md.
        about: {"machine": ..., "versions": ..., "settings": ...}: what the records have in common.
        order: names of the workloads, in the order of the table.
    """

    def __init__(self, folder: Path, about: dict[str, Any], order: list[str]) -> None:
        self.folder = folder
        self.about = about
        self.records: dict[str, Record] = {}
        self._order = {name: place for place, name in enumerate(order)}
        self._merge()

    @property
    def path(self) -> Path:
        return self.folder / "results.json"

    def _merge(self) -> None:
        if not self.path.exists():
            return
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            same = found["schema"] == SCHEMA and all(_are_same(found[key], value) for key, value in self.about.items())
            if same:
                self.records = {data["name"]: Record.from_json(data) for data in found["workloads"]}
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            self.path.replace(self.folder / "results.previous.json")

    def add(self, record: Record) -> None:
        """Takes the record in and writes everything."""
        self.records[record.name] = record
        self.write()

    def to_json(self) -> dict[str, Any]:
        """What results.json holds."""
        return {"schema": SCHEMA, **self.about, "workloads": [record.to_json() for record in self.in_order()]}

    def in_order(self) -> list[Record]:
        """The records in the order of the workloads, those of workloads that are no more at the end."""
        last = len(self._order)
        return sorted(self.records.values(), key=lambda record: (self._order.get(record.name, last), record.name))

    def write(self) -> None:
        """results.json and results.md."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, (json.dumps(self.to_json(), indent=1) + "\n").encode())
        write_whole(self.folder / "results.md", tables.markdown(self.about, self.in_order()).encode())


def _are_same(found: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether both say the same. The system keeps more of the memory for itself at one start than at another."""
    sizes = [each.get("memory_gib", 0) for each in (found, now)]
    return {**found, "memory_gib": 0} == {**now, "memory_gib": 0} and abs(sizes[0] - sizes[1]) <= _MEMORY_OF_SYSTEM


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that it is at no time half written: an interruption leaves the old one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp makes files that only their owner can read.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
