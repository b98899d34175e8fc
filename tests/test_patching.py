"""Patches: applied when the target is imported, reversible to the very object, declined when the target looks wrong."""

import copy
import pickle
import sys
import types

import pytest

from fastgen import patching
from fastgen.patching import Patch, PatchSet


def double(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) * 2 if patching.is_active() else wrapped(*args, **kwargs)


@pytest.fixture
def toolkit(monkeypatch):
    """A module that is not imported yet; calling the fixture's value imports it."""
    monkeypatch.setattr(patching, "_enabled", patching._enabled)
    name = "fastgen_test_toolkit"
    source = types.ModuleType(name)
    exec("class Model:\n    def run(self, x):\n        'Adds one.'\n        return x + 1\n", source.__dict__)
    monkeypatch.setitem(sys.modules, name, source)
    return source


def patch_of(toolkit, **changes):
    return Patch(**{"module": toolkit.__name__, "target": "Model.run", "wrapper": f"{__name__}:double", **changes})


def test_enable_wraps_and_disable_restores_the_very_object(toolkit):
    original = vars(toolkit.Model)["run"]
    patch = patch_of(toolkit)
    patches = PatchSet([patch])
    assert patch.state == "not enabled"
    patches.enable()
    assert patch.state == "applied" and toolkit.Model().run(1) == 4
    assert toolkit.Model.run.__doc__ == "Adds one."
    patches.enable()
    assert toolkit.Model().run(1) == 4
    patches.disable()
    assert vars(toolkit.Model)["run"] is original and patch.state == "not enabled"
    patches.enable()
    assert toolkit.Model().run(1) == 4
    patches.disable()
    assert vars(toolkit.Model)["run"] is original


def test_suspended_passes_through_and_nests(toolkit):
    patches = PatchSet([patch_of(toolkit)])
    patches.enable()
    with patching.suspended():
        assert toolkit.Model().run(1) == 2
        with patching.suspended():
            assert toolkit.Model().run(1) == 2
        assert toolkit.Model().run(1) == 2
    assert toolkit.Model().run(1) == 4
    patches.disable()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target": "Model.walk"}, "does not exist"),
        ({"target": "Other.run"}, "does not exist"),
        ({"condition": lambda target: "it looks different"}, "it looks different"),
        ({"wrapper": "fastgen_no_such_module:wrapper"}, "No module named"),
    ],
)
def test_a_target_that_looks_wrong_is_left_alone(toolkit, changes, reason):
    original = vars(toolkit.Model)["run"]
    patch = patch_of(toolkit, **changes)
    patches = PatchSet([patch])
    patches.enable()
    assert patch.state.startswith("not applied: ") and reason in patch.state
    assert vars(toolkit.Model)["run"] is original
    patches.disable()


def test_a_module_that_is_imported_later_is_patched_then(tmp_path, monkeypatch):
    monkeypatch.setattr(patching, "_enabled", patching._enabled)
    (tmp_path / "fastgen_late_toolkit.py").write_text("class Model:\n    def run(self, x):\n        return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    patch = Patch("fastgen_late_toolkit", "Model.run", f"{__name__}:double")
    patches = PatchSet([patch])
    patches.enable()
    assert patch.state == "waiting for import" and "fastgen_late_toolkit" not in sys.modules
    import fastgen_late_toolkit

    assert patch.state == "applied" and fastgen_late_toolkit.Model().run(1) == 4
    patches.disable()
    assert fastgen_late_toolkit.Model().run(1) == 2


def test_a_wrapper_of_somebody_else_is_not_thrown_away(toolkit):
    patch = patch_of(toolkit)
    patches = PatchSet([patch])
    patches.enable()
    ours = toolkit.Model.run
    toolkit.Model.run = lambda self, x: ours(self, x) + 100
    patches.disable()
    assert "another library" in patch.state
    assert toolkit.Model().run(1) == 102


class Keeper:
    """Keeps a method of another object, as PEFT's models do."""


def test_methods_that_are_kept_are_copied_and_pickled(toolkit):
    """A copy has the method of its own object; all of them are wrapped as long as the patch is there."""
    toolkit.Model.__module__, toolkit.Model.__qualname__ = toolkit.__name__, "Model"
    patches = PatchSet([patch_of(toolkit)])
    patches.enable()
    keeper = Keeper()
    keeper.model = toolkit.Model()
    keeper.run, keeper.function = keeper.model.run, toolkit.Model.__dict__["run"]
    copies = [copy.copy(keeper), copy.deepcopy(keeper), pickle.loads(pickle.dumps(keeper))]
    for each in copies:
        assert each.run(1) == 4 and each.function(each.model, 1) == 4
    assert copies[0].run.__self__ is keeper.model
    assert all(each.run.__self__ is each.model and each.model is not keeper.model for each in copies[1:])
    patches.disable()
    assert [each.run(1) for each in copies] == [2, 2, 2]
