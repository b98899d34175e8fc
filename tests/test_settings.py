"""Settings from the environment and from code."""

import contextvars
import threading

import pytest

import fastgen
from fastgen import settings


@pytest.fixture
def defaults(monkeypatch):
    monkeypatch.setattr(settings, "_current", settings.Settings())


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False), ("off", False), ("No", False)]
)
def test_environment(monkeypatch, value, expected):
    monkeypatch.setenv("FASTGEN_STRICT", value)
    monkeypatch.delenv("FASTGEN_DISABLE", raising=False)
    assert settings.Settings.from_environment() == settings.Settings(disabled=False, strict=expected)


def test_change_installs_a_copy(defaults):
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
    with pytest.raises(ValueError, match="FASTGEN_CAPTURED_STEP.*sometimes.*auto, always, never"):
        settings.Settings.from_environment()


def test_bits_and_activations(monkeypatch):
    monkeypatch.setenv("FASTGEN_KEEP_BITS", "1")
    monkeypatch.setenv("FASTGEN_ACTIVATIONS", "int8")
    found = settings.Settings.from_environment()
    assert found.keep_bits and found.activations == "int8" and found.explicit == {"keep_bits", "activations"}
    assert not settings.Settings().keep_bits and settings.Settings().activations == "float"
    with pytest.raises(ValueError, match="keep_bits .FASTGEN_KEEP_BITS. is 'yes': give True or False"):
        settings.change(keep_bits="yes")


@pytest.mark.parametrize(("old", "new"), [("exact", "float"), ("int8", "int8")])
def test_the_old_name_of_activations(defaults, monkeypatch, old, new):
    monkeypatch.setenv("FASTGEN_FEW_BITS_INPUTS", old)
    with pytest.warns(DeprecationWarning, match="FASTGEN_FEW_BITS_INPUTS is now called FASTGEN_ACTIVATIONS"):
        assert settings.Settings.from_environment().activations == new
    with pytest.warns(DeprecationWarning, match="few_bits_inputs is now called activations"):
        fastgen.enable(few_bits_inputs=old)
    assert settings.current().activations == new
    with pytest.raises(TypeError, match="few_bits_inputs is the old name of activations"):
        fastgen.enable(few_bits_inputs=old, activations=new)


def test_blocks_of_two_threads_that_overlap_leave_nothing_behind(defaults):
    first_began, second_began, first_ended = (threading.Event() for _ in range(3))

    def other():
        first_began.wait()
        with settings.changed(captured_step="always", packed_weights="keep"):
            second_began.set()
            first_ended.wait()

    thread = threading.Thread(target=other)
    thread.start()
    with settings.changed(padding="zero"):
        first_began.set()
        second_began.wait()
        assert settings.current().packed_weights == "call"
    first_ended.set()
    thread.join()
    assert settings.current() == settings.Settings()


def test_a_block_counts_for_threads_in_its_context_and_what_is_changed_in_it_stays(defaults):
    seen = []
    with settings.changed(padding="zero"):
        for target in (contextvars.copy_context().run, lambda look: look()):
            thread = threading.Thread(target=target, args=(lambda: seen.append(settings.current().padding),))
            thread.start()
            thread.join()
        settings.change(captured_step="never")
        assert settings.current() == settings.Settings(padding="zero", captured_step="never")
    assert seen == ["zero", "exact"]
    assert settings.current() == settings.Settings(captured_step="never")


def test_a_setting_that_is_gone_warns_and_does_nothing(defaults, monkeypatch):
    for value in ("measured", "fixed"):
        with pytest.warns(DeprecationWarning, match="LINEAR_PRODUCTS has no effect any more".lower()):
            fastgen.enable(linear_products=value)
        monkeypatch.setenv("FASTGEN_LINEAR_PRODUCTS", value)
        with pytest.warns(DeprecationWarning, match="FASTGEN_LINEAR_PRODUCTS has no effect any more"):
            assert settings.Settings.from_environment() == settings.Settings()
    with pytest.raises(ValueError, match="linear_products is 'fast'; known: measured, fixed"):
        fastgen.enable(linear_products="fast")
    assert settings.current() == settings.Settings()


@pytest.mark.parametrize(
    "given",
    [{"strict": "off"}, {"strict": 1}, {"weight_group_size": 64.0}, {"weight_group_size": "64"}, {"padding": True}],
    ids=str,
)
def test_values_that_only_look_like_one(defaults, given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}.*known: "):
        fastgen.enable(**given)
    assert settings.current() == settings.Settings()
