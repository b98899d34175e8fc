"""Values in a configuration: what FairSeq evaluates is read, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from fairseq import utils
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.optimizer.fairseq.compat.literals import RefusedValue, evaluate

PUBLISHED = [
    "20,40", "10000", "(0.9, 0.98)", "True", "None", " [(512, 3)] * 14 + [(1024, 3)] * 4", "3 * [True] + [False]",
    "[(512, 10, 5)] + [(512, 3, 2)] * 4 + [(512,2,2)] + [(512,2,2)]", "(1e-30, 1e-3)", "{'a': [1, -2.5], 'b': None}",
    "((256, 4, 1024, True, 0.2, 0.2, 0.2),) * 2", "('model', \"lexicon\", 2, -1)", "{1, 2}", "2 * 512 - 1",
]  # fmt: skip


@pytest.mark.parametrize("text", PUBLISHED)
def test_values_written_out_are_read(text):
    assert evaluate(text) == eval(text.strip()) and type(evaluate(text)) is type(eval(text.strip()))


REFUSED = [
    "", "x", "os.sep", "print()", "(lambda: 1)()", "[x for x in (1,)]", "f'{1}'", "2 ** 64", "1 << 9", "'a' * 9", "~1",
    "1 if 1 else 2", "(1, 2)[0]", "{**{}}", "{[]}", "True + True", "1\n2", "\0", "\ud800", "x := 1", "-[1]",
    "[1] * 2.0",
]  # fmt: skip
BOMBS = {
    "a long list": "[1] * 10 ** 9", "a longer list": "[1] * 999999999",
    "lists in lists": "[[[1] * 1000] * 1000] * 1000", "a long sum": "1" + "+1" * 45000,
    "a long product": "[1]" + "*2" * 20000, "products of numbers": "9" * 18 + ("*" + "9" * 18) * 4000,
    "many digits": "9" * 90000, "brackets": "[" * 90000, "closed brackets": "[" * 45000 + "]" * 45000,
    "signs": "-" * 90000 + "1", "a long text": "'" + "a" * 200000 + "'",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_anything_else_is_refused(text):
    with pytest.raises(RefusedValue, match="only a value written out"):
        evaluate(text)


def test_what_would_be_very_large_is_refused_at_once():
    """In a process of its own, with little memory and time: a crash or a bomb would end this one."""
    code = (
        "import json, resource, sys\n"
        "from fastgen.optimizer.fairseq.compat.literals import RefusedValue, evaluate\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "for name, text in json.load(sys.stdin).items():\n"
        "    print(name, file=sys.stderr, flush=True)\n"
        "    try: evaluate(text)\n"
        "    except RefusedValue as error: assert len(str(error)) < 600\n"
        "    else: sys.exit('accepted')"
    )
    given = json.dumps(BOMBS)
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]


def test_what_is_no_text_is_refused_as_python_does():
    for value in (True, None, 3, compile("1", "", "eval")):
        with pytest.raises(TypeError):
            evaluate(value)
    assert utils.eval_bool(True, default=False) is False and utils.eval_bool("True") is True


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_every_literal_is_what_it_was(value):
    if repr(value).find("inf") < 0:
        assert evaluate(repr(value)) == value


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("[]()*+-,12. 'aex_{}:\n#"), max_size=30))
def test_every_text_is_a_value_or_refused(text):
    try:
        value = evaluate(text)
    except RefusedValue:
        return
    assert value == eval(text.lstrip(" \t"), {"__builtins__": {}})
