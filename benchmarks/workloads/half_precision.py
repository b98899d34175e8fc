"""What half precision changes: BLEU and ROUGE of the examples' trained model, and the outputs that stay the same.

The model restores the held-out passages with 4 beams, unpatched and with FastGen, in float32 and in both half
precisions. In float32 the outputs must be the same. In half precision the order of a sum decides now and then, so
what counts are the scores: "bleu fp16" is by how much FastGen's differ from unpatched in the same precision, in points
of 100, and "same fp16" the share of outputs that do not differ at all.
"""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fastgen
from benchmarks.machine import ROOT
from benchmarks.measure import summary
from benchmarks.record import Record, Target
from benchmarks.workload import CAPTURED_STEP, Context, Workload

_PACKAGES = {"bleu": "sacrebleu", "rouge": "rouge_score"}
_SCORES = {"bleu": "bleu", "rouge": "rougeL"}
_WAYS = ("transformers", "fastgen")


@dataclass(frozen=True, kw_only=True)
class HalfPrecision(Workload):
    """Attributes: `passages` to restore, the `dtypes`, and where model and passages are."""

    passages: int
    batch: int = 64
    beams: int = 4
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    model: Path = ROOT / "examples" / "models" / "kjv-bart"
    sources: Path = ROOT / "examples" / "data" / "heldout.src.txt"
    references: Path = ROOT / "examples" / "data" / "heldout.ref.txt"
    needs_gpu: bool = True

    group = "half"

    @property
    def _what(self) -> str:
        """The entry point that must have accelerated."""
        return CAPTURED_STEP if self.needs_gpu else self.entry_point

    def run(self, context: Context, record: Record) -> None:
        metrics = tuple(name for name, package in _PACKAGES.items() if importlib.util.find_spec(package) is not None)
        for name in sorted(set(_PACKAGES) - set(metrics)):
            record.skipped[name] = f"{_PACKAGES[name]} is not installed"
        record.parameters = {"passages": self.passages, "batch": self.batch, "beams": self.beams}
        record.baseline, record.subject = (f"{way}, {self.dtypes[-1]}" for way in _WAYS)
        record.identical, record.accelerated = True, True
        with tempfile.TemporaryDirectory() as folder:
            for dtype in self.dtypes:
                found = {way: self._restore(way, dtype, metrics, Path(folder), context, record) for way in _WAYS}
                self._compare(dtype, metrics, *found.values(), record)
        record.compare()

    def _restore(
        self, way: str, dtype: str, metrics: tuple[str, ...], folder: Path, context: Context, record: Record
    ) -> tuple[list[str], dict[str, float]]:
        """The outputs and their scores."""
        from fastgen.pipeline import generate_dataset

        out = folder / f"{way}-{dtype}.txt"
        options: dict[str, Any] = {"metrics": metrics, "reference": str(self.references)} if metrics else {}

        def work() -> Any:
            return generate_dataset(
                self.model, self.sources, out, generation={"num_beams": self.beams}, batch_size=self.batch,
                dtype=dtype, device=str(context.device), limit=self.passages, quiet=True, workers=0, **options,
            )  # fmt: skip

        fastgen.reset_stats()
        if way == "transformers":
            with fastgen.disabled():
                report = work()
        else:
            report = work()
            counts = fastgen.stats().get(self._what, {})
            left = counts.get("fallback") or counts.get("not used")
            record.accelerated = bool(record.accelerated and counts.get("accelerated") and not left)
        name = f"{way}, {dtype}"
        record.backends[name] = summary([report.seconds["generate"]])
        context.log(f"{name}: {report.seconds['generate']:.3g} s, {report.metrics}")
        return out.read_text().splitlines(), report.metrics

    def _compare(
        self,
        dtype: str,
        metrics: tuple[str, ...],
        unpatched: tuple[list[str], dict[str, float]],
        patched: tuple[list[str], dict[str, float]],
        record: Record,
    ) -> None:
        same = sum(a == b for a, b in zip(unpatched[0], patched[0], strict=True)) / max(len(patched[0]), 1)
        record.metrics[f"same {dtype}"] = record.same[f"fastgen, {dtype}"] = same
        if dtype == "fp32" and same < 1:
            record.identical = False
            record.notes.append(f"in fp32, {100 * (1 - same):.1f} % of the outputs differ")
        parts = [f"{100 * same:.1f} % of the outputs are the same"]
        for metric in metrics:
            before, after = (found[1][_SCORES[metric]] for found in (unpatched, patched))
            record.metrics[f"{metric} {dtype}"] = abs(after - before)
            parts.append(f"{_SCORES[metric]} {before:.2f} unpatched, {after:.2f} with FastGen")
        record.notes.append(f"{dtype}: {', '.join(parts)}")


HALF_ON_GPU = HalfPrecision(
    name="gpu-half-precision",
    title="Restoring passages with the examples' model, half precision",
    passages=500,
    targets=tuple(
        Target(f"points by which {metric} in {dtype} is off", f"{metric} {dtype}", at_most=0.1)
        for metric in _PACKAGES
        for dtype in ("fp16", "bf16")
    ),
)
HALF_ON_CPU = replace(HALF_ON_GPU, name="half-precision", batch=4, needs_gpu=False)
WORKLOADS = [HALF_ON_CPU]
