"""Every module of FairSeq that evaluates texts has the evaluation that reads values only."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

import fastgen
from fastgen.optimizer.fairseq.compat import literals
from fastgen.optimizer.fairseq.compat.literals import evaluate


def evaluating() -> set[str]:
    """The modules of FairSeq that name `eval`, its examples left out: only their user imports them."""
    found = set()
    for package in ("fairseq", "fairseq_cli"):
        root = Path(next(iter(importlib.util.find_spec(package).submodule_search_locations)))
        for file in root.rglob("*.py"):
            name, text = file.relative_to(root.parent).with_suffix("").as_posix().replace("/", "."), file.read_text()
            if name.startswith("fairseq.examples.") or "eval" not in text:
                continue
            if any(isinstance(node, ast.Name) and node.id == "eval" for node in ast.walk(ast.parse(text))):
                found.add(name)
    return found


def test_every_module_that_evaluates_has_the_safe_one():
    """Of any release: those that are listed, those that are imported, and no other."""
    modules = evaluating()
    assert modules and modules <= set(literals.MODULES)
    for module in modules:
        with contextlib.suppress(ImportError):
            assert vars(importlib.import_module(module))["eval"] is evaluate, module
    fastgen.disable()
    assert not any("eval" in vars(sys.modules[module]) for module in modules if module in sys.modules)
