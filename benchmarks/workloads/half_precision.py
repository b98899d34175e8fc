"""The effect of half precision: BLEU and ROUGE of the examples' trained model, and the share of unchanged outputs.

The model restores the held-out passages with 4 beams, unpatched and with FastGen, in float32 and in both half
precisions. In float32 the outputs must be equal. In half precision the order of summation sometimes decides, so that
the scores matter: "bleu fp16" is the difference of FastGen's score from unpatched in the same precision, in points of
100, and "same fp16" the share of equal outputs.
"""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fastgen
from benchmarks import ROOT, backends
from benchmarks.measure import alternate
from benchmarks.record import Record
from benchmarks.workload import CAPTURED_STEP, Context, Workload

# By metric: the score, and the package that it needs.
_SCORES = {"bleu": ("bleu", "sacrebleu"), "rouge": ("rougeL", "rouge_score")}


@dataclass(frozen=True, kw_only=True)
class HalfPrecision(Workload):
    """Attributes: the number of `passages` to restore, the `dtypes`, and the paths of the model and the passages."""

    passages: int
    batch: int = 64
    beams: int = 4
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    model: Path = ROOT / "examples" / "models" / "kjv-bart"
    sources: Path = ROOT / "examples" / "data" / "heldout.src.txt"
    references: Path = ROOT / "examples" / "data" / "heldout.ref.txt"
    baseline: str = "transformers, bf16"
    subject: str = "fastgen, bf16"
    needs_gpu: bool = True

    group = "half"

    @property
    def entry_point(self) -> str:  # type: ignore[override]
        return CAPTURED_STEP if self.needs_gpu else "transformers.generate"

    def run(self, context: Context, record: Record) -> None:
        record.parameters = {"passages": self.passages, "batch": self.batch, "beams": self.beams}
        record.identical, record.accelerated = True, True
        scores = {}
        for metric, (score, package) in _SCORES.items():
            if importlib.util.find_spec(package) is None:
                record.skipped[metric] = f"{package} is not installed"
            else:
                scores[metric] = score
        with tempfile.TemporaryDirectory() as folder:
            works = {
                f"{way}, {dtype}": partial(self._restore, way, dtype, tuple(scores), Path(folder), context)
                for dtype in self.dtypes
                for way in (backends.BASELINE, backends.SUBJECT)
            }
            found = record.take(alternate(works, 1, context.log))
        for dtype in self.dtypes:
            (unpatched, before, _), (patched, after, counts) = (
                found[f"{way}, {dtype}"][0] for way in (backends.BASELINE, backends.SUBJECT)
            )
            left = counts.get("fallback") or counts.get("not used")
            record.accelerated = bool(record.accelerated and counts.get("accelerated") and not left)
            same = sum(a == b for a, b in zip(unpatched, patched, strict=True)) / len(patched)
            record.metrics[f"same {dtype}"] = record.same[f"fastgen, {dtype}"] = same
            if dtype == "fp32" and same < 1:
                record.identical = False
            parts = [f"{100 * same:.1f} % of the outputs are the same"]
            for metric, score in scores.items():
                record.metrics[f"{metric} {dtype}"] = abs(after[score] - before[score])
                parts.append(f"{score} {before[score]:.2f} unpatched, {after[score]:.2f} with FastGen")
            record.notes.append(f"{dtype}: {', '.join(parts)}")

    def _restore(
        self, way: str, dtype: str, metrics: tuple[str, ...], folder: Path, context: Context
    ) -> tuple[float, tuple[list[str], dict[str, float], dict[str, Any]]]:
        """Returns the seconds; the outputs, their scores, and FastGen's counts."""
        from fastgen.pipeline import generate_dataset

        out = folder / f"{way}-{dtype}.txt"
        options: dict[str, Any] = {"metrics": metrics, "reference": str(self.references)} if metrics else {}
        fastgen.reset_stats()
        with backends.make(way).active():
            report = generate_dataset(
                self.model, self.sources, out, generation={"num_beams": self.beams}, batch_size=self.batch,
                dtype=dtype, device=str(context.device), limit=self.passages, quiet=True, workers=0, **options,
            )  # fmt: skip
        counts = fastgen.stats().get(self.entry_point, {})
        return report.seconds["generate"], (out.read_text().splitlines(), report.metrics, counts)


HALF_ON_GPU = HalfPrecision(
    name="gpu-half-precision",
    title="Restoring passages with the examples' model, half precision",
    passages=500,
)
WORKLOADS = [replace(HALF_ON_GPU, name="half-precision", batch=4, needs_gpu=False)]
