"""The release of Transformers that is installed: every patch fits it, and it is one that FastGen says is tested."""

from __future__ import annotations

import importlib
import sys

import pytest
import transformers

import fastgen
import fastgen.optimizer.transformers as optimizer


def import_targets(module: str) -> bool:
    """Whether the release has the module, which is then imported. Older releases lack some models."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert f"{module}.".startswith(f"{error.name}."), error  # something else is missing
        return False
    return True


def test_every_patch_is_applied() -> None:
    targets = [patch for patch in optimizer.patches() if patch.module.startswith("transformers.")]
    there = {patch.name for patch in targets if import_targets(patch.module)}
    states = {name: state for name, state in fastgen.status().patches.items() if name in there}
    assert len(states) >= 40
    assert set(states.values()) == {"applied"}


def test_version_is_in_the_tested_range() -> None:
    assert fastgen.status().versions["transformers"] == transformers.__version__
    assert fastgen.status().notes == []


@pytest.mark.parametrize("version", ["4.57.1", "6.0.0"])
def test_version_outside_the_tested_range_is_noted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library makes its module anew when some of its parts are imported.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    assert version in fastgen.status().notes[0]
