"""Every place in FairSeq that could run code, or read what may hold code, is known and safe."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fairseq
import pytest

import fastgen
from fastgen.optimizer.fairseq.compat import literals
from fastgen.optimizer.fairseq.compat.literals import evaluate
from tests.fairseq.places import PLACES

RELEASE = fairseq.__version__
PACKAGES = ("fairseq", "fairseq_cli")

# Whatever can run code or read what may hold code: names, and attributes of modules.
_NAMES = {"eval", "exec", "compile", "__import__", "globals", "import_module", "check_output", "Popen"}
_MODULES = {"importlib", "pickle", "subprocess", "runpy", "marshal", "shelve", "dill", "joblib", "shutil"}
_CALLS = {
    "torch.load", "np.load", "numpy.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "os.system", "os.popen",
    "archive.extractall", "utils.import_user_module", "hydra.utils.instantiate", "torch.jit.load",
    "torch.hub.load",
}  # fmt: skip
_HARMLESS = {"pickle.dumps", "pickle.UnpicklingError", "subprocess.CalledProcessError", "shutil.copyfile"}
_HARMLESS |= {"shutil.move", "shutil.rmtree", "shutil.copyfileobj", "shutil.copy", "shutil.copy2", "shutil.which"}


@functools.cache
def places() -> Counter[str]:
    """Every such place in FairSeq: "file: function: call"."""
    found: Counter[str] = Counter()
    for package in PACKAGES:
        root = Path(next(iter(importlib.util.find_spec(package).submodule_search_locations)))
        for file in sorted(root.rglob("*.py")):
            name = file.relative_to(root.parent).as_posix()
            if not name.startswith("fairseq/examples/"):  # only imported by their user, with --user-dir
                found.update(f"{name}: {where}: {call}" for where, call in _in(ast.parse(file.read_text()), ""))
    return found


def _in(node: ast.AST, where: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inside = f"{where}.{child.name}".lstrip(".")
        called = child.func if isinstance(child, ast.Call) else child
        if _is_place(called):
            yield inside, ast.unparse(child)
            children = ast.iter_child_nodes(child) if called is child else [*child.args, *child.keywords]
            for argument in children:
                yield from _in(argument, inside)
        else:
            yield from _in(child, inside)


def _is_place(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _NAMES
    if not isinstance(node, ast.Attribute):
        return False
    text = ast.unparse(node)
    return text not in _HARMLESS and (text in _CALLS or text.split(".")[-2] in _MODULES)


@pytest.mark.skipif(not RELEASE.startswith("0.12.2"), reason="the list is that of FairSeq 0.12.2")
def test_every_place_that_could_run_code_is_known_and_safe():
    known = Counter(place for group in PLACES.values() for place in group)
    assert places() == known, f"new: {places() - known}; gone: {known - places()}"


def test_every_module_that_evaluates_has_the_safe_one():
    """Of any release: those that are listed, those that are imported, and no other."""
    evaluating = {place.partition(":")[0] for place in places() if ": eval" in place}
    modules = {name.removesuffix(".py").replace("/", ".") for name in evaluating}
    assert modules <= set(literals.MODULES)
    for module in modules:
        with contextlib.suppress(ImportError):
            assert vars(importlib.import_module(module))["eval"] is evaluate, module
    fastgen.disable()
    assert not any("eval" in vars(sys.modules[module]) for module in modules if module in sys.modules)


def test_loaders_keep_to_their_safe_defaults():
    """No call says otherwise: what `torch.load`, `numpy.load` and yaml's loader refuse by themselves."""
    calls = [place for group in PLACES.values() for place in group]
    assert not any("weights_only" in call or "allow_pickle" in call or "UnsafeLoader" in call for call in calls)
