"""What `fastgen.status()`, `python -m fastgen` and the commands say: versions, patches, operators, an own check."""

from __future__ import annotations

import platform
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

from fastgen import counters, ops, patching, releases, settings
from fastgen._version import __version__
from fastgen.counters import CAPTURED_STEP, GENERATE
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
    from fastgen.ops.linear.choose import unavailable

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


# ---- does this installation accelerate?

_DECODING: dict[str, dict[str, Any]] = {"greedy search": {}, "beam search": {"num_beams": 2}}
_NEW_TOKENS = 12


class Finding(NamedTuple):
    """The result of the two runs."""

    accelerates: bool
    detail: str
    """What was accelerated, or why nothing was."""


def check() -> Finding:
    """Generates with a random model of two layers, with the original code and with FastGen.

    Leaves `fastgen.stats()` unchanged, and measures and keeps nothing.
    """
    if not patching.is_active():
        return Finding(False, "FastGen is disabled (fastgen.disable(), or FASTGEN_DISABLE=1)")
    captured_step = "never" if settings.current().captured_step == "never" else "always"
    with (
        counters.set_aside(),
        settings.changed(strict=False, captured_step=captured_step, weight_dtype="fp32"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return _compared()


def _compared() -> Finding:
    import torch

    model = _model()
    prompt = torch.arange(3, 23).unsqueeze(0)
    for name, options in _DECODING.items():
        counters.reset()
        arguments = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "do_sample": False, **options}
        arguments |= {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS}
        with patching.suspended():
            expected = model.generate(**arguments)
        found = model.generate(**arguments)
        stats = counters.snapshot()
        if not stats.get(GENERATE, {}).get("accelerated"):
            reasons = stats.get(GENERATE, {}).get("fallback") or {"generate is not hooked": 1}
            return Finding(False, f"{name} runs on the original code: {next(iter(reasons))}")
        if not torch.equal(expected, found):
            return Finding(False, f"{name} gives other tokens than the original code: please report this")
    captured: Any = stats.get(CAPTURED_STEP, {})
    if captured.get("accelerated"):
        return Finding(True, "hooks and captured steps, same tokens")
    is_never = settings.current().captured_step == "never"
    missing = "captured_step is never" if is_never else "the decoding loops are not hooked"
    reason = next(iter(captured.get("not used", {})), missing)
    return Finding(True, f"hooks, same tokens; no captured steps: {reason}")


def _model() -> Any:
    """Returns a random Llama of two layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def line() -> tuple[str, bool]:
    """Returns the first line of `python -m fastgen`, and whether it is positive."""
    try:
        import transformers
    except ImportError as error:
        return f"FastGen does not accelerate here: Transformers cannot be imported ({error})", False
    try:
        found = check()
    except Exception as error:  # this line tells the user that something is wrong
        found = Finding(False, f"a model of two layers fails with {type(error).__name__}: {error}")
    release = f"Transformers {transformers.__version__}"
    if not releases.is_tested(transformers.__version__):
        release += f" (not tested: {' to '.join(releases.TESTED)} are)"
    if found.accelerates:
        import torch

        from fastgen.ops import _library

        missing = _library.load("CPU")
        if missing and not _library.is_disabled() and not torch.cuda.is_available():
            hardly = "FastGen runs here WITHOUT its compiled operators, and hardly accelerates"
            return f"{hardly} ({missing}): {release}, {found.detail}", False
        without = f", without compiled operators ({missing})" if missing else ""
        return f"FastGen accelerates here{without}: {release}, {found.detail}", True
    return f"FastGen does NOT accelerate here: {release}, {found.detail}", False


def unused_weights(stats: Mapping[str, Any]) -> list[str]:
    """Returns why no layer had the weights that `--weight-dtype` asks for."""
    entries = {name: entry for name, entry in stats.items() if name.endswith(" weights") and not entry["accelerated"]}
    return [
        f"no {name}: {'; '.join([*entry['fallback'], *entry.get('not used', {})])}" for name, entry in entries.items()
    ]
