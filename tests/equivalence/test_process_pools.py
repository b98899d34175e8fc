"""Pools of processes get a model, its `generate` and partial calls of it: forked after a step was captured, or anew."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

# A file, because a process that is started anew imports it.
_SCRIPT = """
import functools, multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import torch
import fastgen


def use(model, ids, options):
    torch.set_num_threads(1)
    return model.generate(ids, **options)


def counts():
    return fastgen.stats()


def executor(context, calls):
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        started = [pool.submit(function, *args, **kwargs) for function, args, kwargs in calls]
        return [each.result(timeout=120) for each in started]


def pool(context, calls):
    with context.Pool(1) as pool:
        started = [pool.apply_async(function, args, kwargs) for function, args, kwargs in calls]
        return [each.get(timeout=120) for each in started]


def check(method, kind, family):
    model, options = family.build(), {**family.make_inputs(), "max_new_tokens": 12}
    ids = options.pop("input_ids")
    with fastgen.disabled():
        expected, beams = model.generate(ids, **options), model.generate(ids, num_beams=3, **options)
    fastgen.enable(captured_step="always")
    fastgen.reset_stats()
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, num_beams=3, **options), beams)
    assert fastgen.stats()["transformers.captured_step"]["accelerated"] == 2, fastgen.stats()
    partial = functools.partial(model.generate, num_beams=3, **options)
    calls = [(use, (model, ids, options), {}), (model.generate, (ids,), options), (partial, (ids,), {})]
    before = fastgen.stats() if method == "fork" else {}
    *found, after = {"executor": executor, "pool": pool}[kind](
        multiprocessing.get_context(method), [*calls, (counts, (), {})]
    )
    for result, wanted in zip(found, (expected, expected, beams), strict=True):
        assert torch.equal(result, wanted)
    for entry in ("transformers.generate", *(["transformers.captured_step"] if before else [])):
        assert after[entry]["accelerated"] - before.get(entry, {}).get("accelerated", 0) == 3, after
        assert not after[entry]["fallback"], after
    assert torch.equal(model.generate(ids, **options), expected)


if __name__ == "__main__":
    from tests.equivalence.models import BY_NAME

    torch.set_num_threads(1)  # with more, a forked process waits for ever for OpenMP's threads, without FastGen too
    for words in sys.argv[1:]:
        method, kind, name = words.split()
        check(method, kind, BY_NAME[name])
"""

_ALL = [
    f"{method} {kind} {name}"
    for method in ("fork", "spawn", "forkserver")
    for kind in ("executor", "pool")
    for name in ("llama", "bart", "t5")
]


@pytest.mark.parametrize(
    "uses",
    [["fork pool bart", "spawn executor llama"], *(pytest.param([each], marks=pytest.mark.long) for each in _ALL)],
)
def test_a_pool_of_processes(uses: list[str], tmp_path: Path, programs: Path) -> None:
    script = tmp_path / "pools.py"
    script.write_text(_SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [programs / "python", script, *uses],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
