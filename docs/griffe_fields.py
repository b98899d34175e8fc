"""Puts the fields of dataclasses, with what is said of each, into the docstring of the class, for the API reference."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Fields(griffe.Extension):
    """Docstrings of fields, and the help of options of commands, become the section "Attributes" of their class."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **unused: Any) -> None:
        """`name: type = option(default, "help")` is `name: type = default`, and the help is its docstring."""
        call = getattr(node, "value", None)
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "option"):
            return
        default, about = call.args[:2]
        # What is looked up when the options are made has no value to show.
        attr.value = "..." if isinstance(default, ast.Lambda) else ast.unparse(default)
        parts = about.values if isinstance(about, ast.JoinedStr) else [about]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts)
        attr.docstring = griffe.Docstring(text, parent=attr)

    def on_package(self, *, pkg: griffe.Module, **unused: Any) -> None:
        """When all is read, so that inherited fields are known."""
        for module in _modules(pkg):
            for kind in module.classes.values():
                if not kind.is_alias and "dataclass" in kind.labels:
                    _describe(kind)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    below = [member for member in module.modules.values() if not member.is_alias]
    return [module, *(found for member in below for found in _modules(member))]


def _describe(kind: griffe.Class) -> None:
    if kind.docstring is None or "Attributes:" in kind.docstring.value:
        return
    members = {**kind.inherited_members, **kind.members}
    lines = []
    for name, member in members.items():
        if name.startswith("_") or name.isupper() or not member.is_attribute or member.docstring is None:
            continue
        text = " ".join(member.docstring.value.split())
        lines.append(f"    {name}: {text.replace('<', '&lt;')}")
    if lines:
        kind.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)
