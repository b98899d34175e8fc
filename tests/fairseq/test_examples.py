"""FairSeq's examples, which are imported with --user-dir, evaluate values only; the user's own code is as it is."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from types import SimpleNamespace

import fairseq
import pytest
from fairseq import utils

from fastgen.optimizer.fairseq.compat.literals import RefusedValue
from tests.fairseq.test_configured_code import trap  # noqa: F401 (a fixture)


def test_examples_of_a_checkout(tmp_path, trap, monkeypatch):  # noqa: F811
    """They are beside the package there, and maybe linked to from it."""
    (tmp_path / "fairseq").mkdir()
    (tmp_path / "setup.py").touch()
    (tmp_path / "examples" / "linked").mkdir(parents=True)
    (tmp_path / "examples" / "linked" / "__init__.py").write_text("def read(text):\n    return eval(text)\n")
    monkeypatch.setattr(fairseq, "__file__", str(tmp_path / "fairseq" / "__init__.py"))
    monkeypatch.syspath_prepend(str(tmp_path / "examples"))
    utils.import_user_module(Namespace(user_dir=str(tmp_path / "examples" / "linked")))
    with pytest.raises(RefusedValue):
        sys.modules["linked"].read(trap.code)
    monkeypatch.delitem(sys.modules, "linked")
    # Entries of other types, and finders that know another way only, are none of its business.
    monkeypatch.setattr(sys, "path", [None, b"bytes", *sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, SimpleNamespace(find_module=lambda name, path=None: None)])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("a_module_that_is_nowhere")


def test_models_among_the_examples(tmp_path, trap, monkeypatch):  # noqa: F811
    """Of FairSeq's own, which are imported with --user-dir; a directory of the user's own is as it is."""
    (tmp_path / "fairseq" / "examples" / "theirs").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    for name in ("fairseq/examples/theirs", "mine"):
        (tmp_path / name / "__init__.py").write_text("def read(text):\n    return eval(text)\n")
        (tmp_path / name / "later.py").write_text("wide = eval('[(512, 3)] * 2')\nread = eval")
        monkeypatch.syspath_prepend(str((tmp_path / name).parent))
    monkeypatch.setattr(fairseq, "__file__", str(tmp_path / "fairseq" / "__init__.py"))
    for name in ("fairseq/examples/theirs", "mine"):
        utils.import_user_module(Namespace(user_dir=str(tmp_path / name)))
    with pytest.raises(RefusedValue):
        sys.modules["theirs"].read(trap.code)
    assert sys.modules["mine"].read("max(1, 2)") == 2
    later = {name: importlib.import_module(f"{name}.later") for name in ("theirs", "mine")}
    assert later["theirs"].wide == [(512, 3), (512, 3)]
    with pytest.raises(RefusedValue):
        later["theirs"].read(trap.code)
    assert later["mine"].read("max(1, 2)") == 2
    for name in ("theirs", "mine", "theirs.later", "mine.later"):
        monkeypatch.delitem(sys.modules, name)
