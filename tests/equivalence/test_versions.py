"""The release of Transformers that is installed: every patch fits it, and it is one that FastGen says is tested."""

from __future__ import annotations

import pytest
import transformers
import transformers.generation.utils  # the targets
import transformers.models.prophetnet.modeling_prophetnet

import fastgen


def test_every_patch_is_applied() -> None:
    patches = {name: state for name, state in fastgen.status().patches.items() if name.startswith("transformers.")}
    assert len(patches) >= 5
    assert set(patches.values()) == {"applied"}


def test_version_is_in_the_tested_range() -> None:
    assert fastgen.status().versions["transformers"] == transformers.__version__
    assert fastgen.status().notes == []


@pytest.mark.parametrize("version", ["4.57.1", "6.0.0"])
def test_version_outside_the_tested_range_is_noted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", version)
    assert version in fastgen.status().notes[0]
