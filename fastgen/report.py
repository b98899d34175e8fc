"""Builds the result of `fastgen.status()`: versions, patches, operators."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata

from fastgen import ops, patching, releases, settings
from fastgen._version import __version__
from fastgen.optimizer import fairseq
from fastgen.patching import PatchSet

# The first and the last release of each toolkit that the equivalence tests run against.
_TESTED = {"transformers": releases.TESTED, "fairseq": fairseq.TESTED_VERSIONS}
_SAMPLES = (
    "captured steps on a GPU sample from the same distribution, with other random numbers; captured_step='never' "
    "gives the samples of the original code",
)
_OTHER_NAMES = {"fairseq": ("fairseq-fixed",)}


@dataclass(frozen=True)
class Status:
    """A snapshot of what FastGen has changed in this process. `print(fastgen.status())` prints a table."""

    enabled: bool
    """Whether calls are accelerated in this thread."""
    strict: bool
    """Whether a fallback raises."""
    versions: dict[str, str]
    """Versions of fastgen, python, torch, transformers and fairseq, by name; "not installed" where missing."""
    patches: dict[str, str]
    """{target: "applied", "waiting for import", "not enabled" or "not applied: <reason>"}."""
    operators: dict[str, str]
    """{operator: its backend}, what captures decode steps, and whether memory is kept."""
    notes: list[str] = field(default_factory=list)
    """Anything the user should know, such as an untested version."""

    @property
    def _head(self) -> str:
        switch = "enabled" if self.enabled else "disabled"
        return f"FastGen {self.versions['fastgen']}: {switch}{', strict' if self.strict else ''}"

    def summary(self) -> str:
        """Returns a few lines: versions, the operators' instruction set, how many patches are in place, and notes."""
        from fastgen.ops import _library

        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items() if name != "fastgen")
        states = Counter(state.partition(":")[0] for state in self.patches.values())
        refused = [f"  {name}: {state}" for name, state in self.patches.items() if state.startswith("not applied")]
        missing = _library.load("CPU")
        operators = f"NOT compiled: {missing}" if missing else f"compiled for {_instructions()}"
        return "\n".join(
            [
                self._head,
                f"versions: {versions}",
                f"operators: {operators}",
                f"captured steps: {self.operators['captured_step']}",
                f"patches: {', '.join(f'{count} {state}' for state, count in states.items())}",
                *refused,
                *(f"note: {note}" for note in self.notes),
            ]
        )

    def __str__(self) -> str:
        lines = [self._head]
        for title, rows in (("versions", self.versions), ("patches", self.patches), ("operators", self.operators)):
            width = max(map(len, rows))
            lines += ["", f"{title}:", *(f"  {name:<{width}}  {value}" for name, value in rows.items())]
        if self.notes:
            lines += ["", "notes:", *(f"  {note}" for note in self.notes)]
        return "\n".join(lines)


def collect(patches: PatchSet) -> Status:
    """Returns the status of this process. Imports torch, for the operators, but never a toolkit."""
    from fastgen.decoding import host_memory
    from fastgen.decoding.captured import graph
    from fastgen.quantization import layers

    versions = {"fastgen": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in ("torch", *_TESTED)}
    return Status(
        enabled=patching.is_active(),
        strict=settings.current().strict,
        versions=versions,
        patches={patch.name: patch.state for patch in patches.patches},
        operators={**ops.backends(), "captured_step": graph.backend(), "host_memory": host_memory.backend()},
        notes=[
            *_untested(versions),
            *_weights(),
            *layers.notes(),
            *(_SAMPLES if graph.backend() == "CUDA graphs" else ()),
        ],
    )


def _instructions() -> str:
    """Returns the vector instruction set of the operators, and further instructions that they use on this processor."""
    import torch

    asked = {"VNNI": "_is_vnni_supported", "BF16": "_is_avx512_bf16_supported", "AMX": "_is_amx_tile_supported"}
    # private names: a release that lacks one reports less
    found = [name for name, function in asked.items() if getattr(torch.cpu, function, bool)()]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *([f"with {', '.join(found)}"] if found else [])])


def _version(package: str) -> str:
    # An imported toolkit is asked itself: it may differ from the installed one.
    imported = getattr(sys.modules.get(package), "__version__", None)
    if imported is not None:
        return str(imported)
    for distribution in (package, *_OTHER_NAMES.get(package, ())):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _untested(versions: dict[str, str]) -> Iterator[str]:
    for toolkit, (first, last) in _TESTED.items():
        version = versions[toolkit]
        if version != "not installed" and not releases.is_tested(version, (first, last)):
            yield f"{toolkit} {version} is outside the tested range {first} to {last}"


def kernels() -> str:
    """Returns the source of the table that chooses the kernels of linear layers, which affects the last digits."""
    from fastgen.ops.linear import choose

    return choose.backend()


def _weights() -> list[str]:
    """Returns notes about weights that are not the model's own."""
    from fastgen.decoding.derived_weights import unavailable

    notes = {
        "call": [],
        "keep": ["packed_weights is keep: weights that are written to through parameter.data go unnoticed"],
        "never": ["packed_weights is never: linear layers run on torch's own products"],
    }[settings.current().packed_weights]
    wanted = settings.current().weight_dtype
    if wanted != "fp32":
        reason = unavailable(wanted)
        effect = ": results are not those of the model's own weights"
        if reason is not None:
            effect = f", but {reason}: weights on the CPU stay in float32"
        notes.append(f"weight_dtype is {wanted}{effect}")
    return notes
