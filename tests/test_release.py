"""The workflow that makes a release: its file, and the commands that it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fastgen import __version__

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
    assert made == ["check-wheel"] and set(made) <= targets


@pytest.mark.parametrize(("tag", "status"), [("v{}", 0), ("{}", 1), ("v0", 1), ("v{}.1", 1)])
def test_the_tag_must_be_the_version(tag: str, status: int, tmp_path: Path) -> None:
    (check,) = (str(step["run"]) for step in steps() if step.get("name") == "The tag is the version")
    (tmp_path / "python").symlink_to(sys.executable)
    environment = {"GITHUB_REF_NAME": tag.format(__version__), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run(["bash", "-ec", check], cwd=ROOT, env=environment).returncode == status
