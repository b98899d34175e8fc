"""The workflow that makes a release: its file, and the commands that it runs."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def steps() -> list[dict[str, object]]:
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_its_steps_are_targets_of_make() -> None:
    """Whoever publishes can run them at home."""
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    run = [str(step["run"]) for step in steps() if "run" in step]
    made = [words.split()[1] for words in run if words.startswith("make ")]
    assert made == ["wheel", "check-wheel"] and set(made) <= targets


def test_the_tag_must_be_the_version() -> None:
    (check,) = (str(step["run"]) for step in steps() if step.get("name") == "The tag is the version")
    assert "fastgen/_version.py" in check
    names: dict[str, str] = {}
    exec((ROOT / "fastgen" / "_version.py").read_text(encoding="utf-8"), names)
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", names["__version__"])
