"""The fields of `GenerationConfig`, read from its source.

Importing transformers takes seconds, which is too long for `--help` or for a misspelt option. The class lists its
fields in a form that can be read without running it: `self.name = kwargs.pop("name", default)` in the constructor, and
their types and meaning in the docstring. Where the file does not have that form, the class itself is asked.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import SetupError, one_line

_ENTRY = re.compile(r"^ {8}(\w+):? *\(([^\n]*?)\)*:\s*$((?:\n(?: {9,}[^\n]*)?)*)", re.MULTILINE)
_JSON_TYPES = ("list", "dict", "tuple", "Config")
# Fields that describe the file a configuration came from rather than the generation.
_METADATA = {"transformers_version"}


@dataclass(frozen=True)
class GenerationField:
    """One field: its name, the types its documentation names (empty where it names none), and its description."""

    name: str
    types: frozenset[str]
    description: str

    @property
    def is_flag(self) -> bool:
        """Whether the field can be given without a value."""
        return "bool" in self.types

    def parse(self, text: str) -> Any:
        """The value that a word on a command line stands for; ValueError where it is not of the field's types."""
        word = text.strip().lower()
        if word in ("none", "null"):
            return None
        if self.is_flag and word in ("true", "false"):
            return word == "true"
        for name, convert in (("int", int), ("float", float)):
            if name in self.types:
                try:
                    return convert(text)
                except ValueError:
                    pass
        bracketed = text.strip().startswith(("[", "{"))
        if bracketed if "str" in self.types else "json" in self.types or not self.types:
            try:
                return json.loads(text)
            except ValueError as error:
                if self.types or bracketed:
                    raise ValueError(f"{text!r} is not valid JSON: {error}") from error
        if "str" in self.types or not self.types:
            return text
        wanted = " or ".join(sorted("JSON" if name == "json" else name for name in self.types))
        raise ValueError(f"{text!r} is not a value of type {wanted}")


@lru_cache(maxsize=1)
def generation_fields() -> tuple[GenerationField, ...]:
    """Every field of the installed `GenerationConfig`, in its own order."""
    names, documentation = _from_source() or _from_class()
    described = {name: (types, text) for name, types, text in _described(documentation)}
    return tuple(
        GenerationField(name, *described.get(name, (frozenset(), "")))
        for name in names
        if not name.startswith("_") and name not in _METADATA
    )


def _from_source() -> tuple[list[str], str] | None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise SetupError("the package transformers is not installed")
    path = Path(spec.origin).parent / "generation" / "configuration_utils.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "GenerationConfig":
            init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
            names = [name for statement in ast.walk(init) if (name := _popped(statement))] if init else []
            if len(names) > 20:
                return names, ast.get_docstring(node, clean=False) or ""
    return None


def _popped(statement: ast.AST) -> str | None:
    """The field that a statement `self.x = kwargs.pop("x", ...)` sets."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
        return None
    target, call = statement.targets[0], statement.value
    if (
        isinstance(target, ast.Attribute)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "pop"
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value == target.attr
    ):
        return target.attr
    return None


def _from_class() -> tuple[list[str], str]:
    from transformers import GenerationConfig

    return list(vars(GenerationConfig())), GenerationConfig.__doc__ or ""


def _described(documentation: str) -> list[tuple[str, frozenset[str], str]]:
    entries = []
    for name, signature, body in _ENTRY.findall(documentation):
        types = {word for word in ("bool", "int", "float", "str") if re.search(rf"(?<!\[)`?\b{word}\b", signature)}
        if any(word in signature for word in _JSON_TYPES):
            # `list[int]` names int as the type of an element, not of the field.
            outside = re.sub(r"(list|dict|tuple)[\[(].*[\])]", "", signature)
            types = {word for word in types if re.search(rf"\b{word}\b", outside)} | {"json"}
        text = " ".join(body.split())
        entries.append((name, frozenset(types), re.split(r"(?<=[a-z)`])\. ", text)[0][:240]))
    return entries


def read_generation_file(path: str) -> dict[str, Any]:
    """The fields in a generation configuration file, or in the generation_config.json of a directory."""
    file = Path(path)
    if file.is_dir():
        file = file / "generation_config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read the generation config {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise SetupError(f"the generation config {file} is not valid JSON: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise SetupError(f"the generation config {file} is not a JSON object")
    return check_names(values, f"the generation config {file}")


def check_names(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values without metadata; a SetupError names a field that `GenerationConfig` does not have."""
    kept = {name: value for name, value in values.items() if not name.startswith("_") and name not in _METADATA}
    known = {field.name for field in generation_fields()}
    unknown = sorted(set(kept) - known)
    if unknown:
        raise SetupError(f"{where} has the unknown field {unknown[0]!r}")
    return kept
