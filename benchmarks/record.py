"""What a workload reports: one record, which is also what results.json holds for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """What a metric of a workload has to reach. It is reported, and nothing fails where it is missed.

    Attributes:
        what: the metric in words.
        metric: its name in `Record.metrics`.
        at_least: lower bound, or None.
        at_most: upper bound, or None.
        when: (name, value): the target applies only where that other metric is above the value.
    """

    what: str
    metric: str
    at_least: float | None = None
    at_most: float | None = None
    when: tuple[str, float] | None = None

    def judge(self, metrics: dict[str, float]) -> dict[str, Any]:
        """The target beside what was measured; `met` is None where it does not apply or nothing was measured."""
        measured = metrics.get(self.metric)
        applies = self.when is None or metrics.get(self.when[0], -math.inf) > self.when[1]
        met = None
        if measured is not None and applies:
            met = (self.at_least is None or measured >= self.at_least) and (
                self.at_most is None or measured <= self.at_most
            )
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("at least", self.at_least), ("at most", self.at_most))
            if bound is not None
        ]
        return {
            "what": self.what,
            "metric": self.metric,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "bound": " and ".join(bounds),
            "measured": measured,
            "applies": applies,
            "met": met,
        }


@dataclass
class Record:
    """The result of one workload.

    Attributes:
        name, title, group: of the workload.
        parameters: sizes and options, as far as they matter to a reader.
        baseline, subject: the backends whose medians make the ratio: `baseline` divided by `subject`.
        backends: for each backend what `measure.summary` makes of its runs; also "warm_up_seconds", and "version" where
            a backend has one of its own.
        ratios: for each pair of backends "a/b" the median of a divided by that of b, and its spread.
        metrics: further numbers by name; `ratio` and `baseline_seconds` are always there once something was timed, and
            so are the ratios under the names of their pairs.
        skipped: backends that were asked for and not measured, with the reason.
        same: for backends that may give other tokens than the baseline, the share of sequences in which they do not.
        identical: whether all other backends gave the same result in every run; None where that was not looked at.
        accelerated: whether every run of the subject was accelerated, with no fallback; None where that has no meaning.
        fallbacks: {entry point: {reason: calls}} over the subject's runs.
        notes: for the reader: where results differ, how memory was measured.
        memory: for each backend what `memory.measure` found.
        targets: from `Target.judge`.
        errors: what went wrong. A record may have an error and results.
        date, commit, other_load, wall_seconds: filled in by the harness. `other_load` is the number of cores that
            other processes kept busy meanwhile: a measurement is worth little where it is not near zero.
    """

    name: str
    title: str
    group: str
    parameters: dict[str, Any] = field(default_factory=dict)
    baseline: str = "transformers"
    subject: str = "fastgen"
    backends: dict[str, dict[str, Any]] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    same: dict[str, float] = field(default_factory=dict)
    identical: bool | None = None
    accelerated: bool | None = None
    fallbacks: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    targets: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    date: str = ""
    commit: str | None = None
    other_load: float | None = None
    wall_seconds: float | None = None

    @property
    def status(self) -> str:
        """ "failed", "different" (a result was not identical) or "ok"."""
        if self.errors:
            return "failed"
        return "different" if self.identical is False else "ok"

    def compare(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        """Works out the ratio of the medians and its spread, for the two main backends and for `pairs`."""
        main = self._ratio(self.baseline, self.subject)
        if main is not None:
            self.metrics["ratio"] = main["ratio"]
            self.metrics["ratio_min"] = main["min"]
            self.metrics["ratio_max"] = main["max"]
            self.metrics["baseline_seconds"] = self.backends[self.baseline]["median"]
        for other, subject in pairs:
            found = self._ratio(other, subject)
            if found is not None:
                self.ratios[f"{other}/{subject}"] = found
                self.metrics[f"{other}/{subject}"] = found["ratio"]

    def _ratio(self, other: str, subject: str) -> dict[str, float] | None:
        if other not in self.backends or subject not in self.backends:
            return None
        above, below = self.backends[other], self.backends[subject]
        # The spread is that of the pairs: two runs made one after the other saw the same machine.
        pairs = [a / b for a, b in zip(above["seconds"], below["seconds"], strict=False)]
        return {"ratio": above["median"] / below["median"], "min": min(pairs), "max": max(pairs)}

    def count_fallbacks(self, stats: dict[str, Any]) -> None:
        """Adds what `fastgen.stats()` says of one run of the subject."""
        for entry_point, entry in stats.items():
            for reason, calls in {**entry["fallback"], **entry.get("not used", {})}.items():
                reasons = self.fallbacks.setdefault(entry_point, {})
                reasons[reason] = reasons.get(reason, 0) + calls

    def judge(self, targets: tuple[Target, ...]) -> None:
        """Holds the metrics against the targets."""
        self.targets = [target.judge(self.metrics) for target in targets]

    def to_json(self) -> dict[str, Any]:
        """The fields, and the status."""
        return {"status": self.status, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """The record that `to_json` wrote; fields that are not known are left out."""
        if "sides" in data:  # as results.json called them before
            data = {**data, "backends": data["sides"]}
        known = {each.name for each in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})
