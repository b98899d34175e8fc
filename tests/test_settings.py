"""Settings from the environment and from code."""

import pytest

from fastgen import settings


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False), ("off", False), ("No", False)]
)
def test_environment(monkeypatch, value, expected):
    monkeypatch.setenv("FASTGEN_STRICT", value)
    monkeypatch.delenv("FASTGEN_DISABLE", raising=False)
    assert settings.Settings.from_environment() == settings.Settings(disabled=False, strict=expected)


def test_change_installs_a_copy(monkeypatch):
    monkeypatch.setattr(settings, "_current", settings.Settings())
    before = settings.current()
    settings.change(strict=True)
    assert settings.current().strict and not before.strict


def test_an_unknown_setting_is_named():
    with pytest.raises(TypeError, match="unknown setting speed"):
        settings.change(speed=11)


def test_the_captured_step_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("FASTGEN_CAPTURED_STEP", "never")
    assert settings.Settings.from_environment().captured_step == "never"
    monkeypatch.setenv("FASTGEN_CAPTURED_STEP", "sometimes")
    with pytest.raises(ValueError, match="FASTGEN_CAPTURED_STEP.*sometimes.*auto, never"):
        settings.Settings.from_environment()
