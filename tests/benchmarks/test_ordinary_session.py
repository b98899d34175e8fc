"""Sessions in fresh processes that take turns, and first calls. No time is looked at."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import ROOT, backends, lockstep, smollm2
from benchmarks.__main__ import run_workload
from benchmarks.backends import Job, Unsupported
from benchmarks.backends.generate import CAPTURED_STEP
from benchmarks.lockstep import Call, Session, Side
from benchmarks.record import Record
from benchmarks.workload import Context, Outcome
from benchmarks.workloads import first_call
from benchmarks.workloads import ordinary_session as sessions
from benchmarks.workloads.shapes import llama_small
from tests.benchmarks.tiny_configs import CONFIGS

_ALL = {workload.work.name: workload for workload in sessions.WORKLOADS}


def tiny(name: str, **changes) -> sessions.OrdinarySession:
    workload = _ALL[name]
    work = replace(workload.work, config=CONFIGS["opus"], shortest=2, length=9, new_tokens=7)
    return replace(workload, **{"work": work, "fewest_new_tokens": 3, "calls": 2, "repetitions": 1, **changes})


@pytest.mark.parametrize("name", _ALL)
def test_no_two_calls_are_alike(name, seed=1):
    workload = replace(_ALL[name], seed=seed)
    requests = workload.requests()
    sizes = {(len(request.lengths), max(request.lengths), request.new_tokens) for request in requests}
    assert len(sizes) == len(requests) == 24 and requests == workload.requests()
    assert requests != replace(workload, seed=seed + 1).requests()
    fewest, most, shortest, longest = (20, 70, 100, 500) if name == "bart-base" else (12, 96, 8, 160)
    for request in requests:
        assert len(request.lengths) in workload.batches and fewest <= request.new_tokens <= most
        assert all(shortest <= length <= longest for length in request.lengths)
    assert len({len(request.lengths) for request in requests}) > 2


@pytest.fixture
def tiny_smollm2(tmp_path, monkeypatch) -> Iterator[Path]:
    """A tiny model with a tokenizer in the place of SmolLM2."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "models" / "kjv-gpt2")
    tokenizer.save_pretrained(tmp_path)
    model = llama_small(**CONFIGS["llama"] | {"vocab_size": len(tokenizer)})
    model.save_pretrained(tmp_path)
    monkeypatch.setenv(smollm2.VARIABLE, str(tmp_path))
    sessions._text.cache_clear()
    yield tmp_path
    sessions._text.cache_clear()


def test_prompts_are_pieces_of_a_text_padded_on_the_left(tiny_smollm2):
    workload = _ALL["smollm2"]
    call = workload._call(workload.work.make_model(torch.device("cpu")), sessions.Request((3, 8), 5), 0)
    text = sessions._text().tolist()
    assert call.new_tokens == 5 and call.inputs["attention_mask"] == [[0] * 5 + [1] * 3, [1] * 8]
    short, long = call.inputs["input_ids"]
    pieces = [text[start : start + 8] for start in range(len(text))]
    assert long in pieces and short[5:] in [piece[5:] for piece in pieces] and len(set(short[:5])) == 1


# ---- processes that take turns

# Each writes its number to a folder, and tells what state the others are in while it works.
_SCRIPT = """
import os, pathlib, time

def load(asked):
    folder = pathlib.Path(asked["folder"])
    (folder / f"{asked['name']}.pid").write_text(str(os.getpid()))

    def generate(work):
        assert work["new_tokens"] < asked["most"], "out of luck"
        time.sleep(0.05)  # a signal takes a moment
        states = {}
        for path in folder.glob("*.pid"):
            status = pathlib.Path("/proc", path.read_text(), "status")
            if path.stem != asked["name"] and status.exists():
                states[path.stem] = status.read_text().partition("State:")[2].split()[0]
        with (folder / "turns").open("a") as turns:
            turns.write(asked["name"])
        return {"tokens": work["inputs"]["input_ids"], "stats": states}

    return "7", generate
"""


@pytest.fixture
def make_side(tmp_path, monkeypatch):
    monkeypatch.setattr(lockstep, "_PATIENCE_SECONDS", 0.0)
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)

    def make(name: str, most: int = 100) -> Side:
        return Side("A library", Path(sys.executable), script, {"folder": str(tmp_path), "name": name, "most": most})

    return make


_CALLS = [Call({"input_ids": [[number]]}, number) for number in range(4)]


def _fail(name: str, error: Exception) -> None:
    raise error


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the states of processes")
@pytest.mark.parametrize(("turn", "turns"), [(0, "abcbcacababc"), (1, "bcacababcbca")])
def test_one_process_works_while_the_others_are_stopped(make_side, tmp_path, turn, turns):
    found = lockstep.run({name: make_side(name) for name in "abc"}, _CALLS, _fail, turn)
    assert (tmp_path / "turns").read_text() == turns
    for name, session in found.items():
        others = {other: "T" for other in "abc" if other != name}
        assert [outcome.stats for outcome in session.outcomes] == [others] * 4
        assert [outcome.tokens.tolist() for outcome in session.outcomes] == [[[0]], [[1]], [[2]], [[3]]]
        assert session.version == "7" and len(session.seconds) == 4 and min(session.seconds) >= 0.05
        assert session.peak_bytes > 0
        assert len(session.other_load) == 4 and min(session.other_load) >= 0
        pid = (tmp_path / f"{name}.pid").read_text()
        assert not Path("/proc", pid).exists()  # a stopped process has been ended


def test_a_side_that_fails_leaves_the_others(make_side):
    failures = []
    sides = {"a": make_side("a"), "b": make_side("b", most=2), "c": make_side("c")._replace(script=Path("nowhere.py"))}
    found = lockstep.run(sides, _CALLS, lambda name, error: failures.append((name, str(error))))
    assert list(found) == ["a"] and len(found["a"].seconds) == 4
    assert [name for name, _ in failures] == ["c", "b"] and "out of luck" in failures[1][1]


def test_what_has_no_process_of_its_own_is_refused(tmp_path):
    work = tiny("opus-mt").work
    job = Job(work, work.make_model(torch.device("cpu")), {}, 1)
    in_this_process = type("Here", (backends.Backend,), {"run": lambda self, new_tokens: None})("here")
    with pytest.raises(Unsupported, match="here does not run in a process of its own"):
        lockstep.side(in_this_process, job, 1, tmp_path)
    settings = {
        name: lockstep.side(backends.make(name), job, None, tmp_path).question["settings"]
        for name in ("transformers", "fastgen", "fastgen-captured")
    }
    assert settings == {"transformers": None, "fastgen": {}, "fastgen-captured": {"captured_step": "always"}}


def test_a_call_waits_until_the_machine_is_quiet(monkeypatch):
    loads = iter([2.0, 0.5, 0.1])
    looked = []
    monkeypatch.setattr(lockstep.OtherLoad, "cores", lambda self: looked.append(next(loads)) or looked[-1])
    monkeypatch.setattr(lockstep, "_LOOK_SECONDS", 0.125)
    monkeypatch.setattr(lockstep.time, "sleep", lambda seconds: None)
    patience = lockstep._Patience(1.0)
    patience.wait()
    assert looked == [2.0, 0.5, 0.1]
    loads = iter([2.0] * 6 + [0.0])  # 0.75 s of patience are left
    patience.wait()
    patience.wait()
    assert next(loads) == 0.0 and len(looked) == 9


# ---- whole sessions


@pytest.fixture
def at_once(monkeypatch) -> None:
    monkeypatch.setattr(lockstep, "_PATIENCE_SECONDS", 0.0)


@pytest.mark.long
def test_a_session_in_fresh_processes(at_once):
    names = ("transformers", "ctranslate2", "fastgen", "fastgen-captured")
    record = run_workload(tiny("opus-mt"), Context(threads=1, backends=names))
    assert record.errors == [] and set(record.skipped) <= {"ctranslate2"}
    assert record.identical is True and record.accelerated is True and record.status == "ok"
    assert {"transformers", "fastgen", "fastgen-captured"} <= set(record.backends)
    assert record.same.get("ctranslate2", 1.0) == 1.0
    assert record.backends["fastgen"]["version"] == record.backends["transformers"]["version"]
    assert set(record.fallbacks) <= {CAPTURED_STEP}
    for name in ("transformers", "fastgen"):
        assert record.memory[name]["peak_bytes"] > 0
    assert [set(call["seconds"]) for call in record.parameters["calls"]] == [set(record.backends)] * 2
    assert not any(call["captured"] for call in record.parameters["calls"])
    json.dumps(record.to_json())


@pytest.mark.long
def test_a_session_in_bfloat16(tiny_smollm2, at_once):
    workload = replace(_ALL["smollm2-bfloat16"], calls=1, repetitions=1, further_backends=())
    record = run_workload(replace(workload, fewest_new_tokens=96), Context(threads=1, backends=("fastgen-captured",)))
    assert record.errors == [] and record.identical is None
    # 96 tokens are enough for a step, whatever it gains.
    assert record.fallbacks == {} and list(record.backends) == ["fastgen-captured"]


# By side, process and call: ratios 4, 3, 2 and 3, 1/2, 3.
_SECONDS = {
    "transformers": [[4.0, 9.0], [6.0, 3.0], [8.0, 6.0]],
    "fastgen": [[1.0, 3.0], [2.0, 6.0], [4.0, 2.0]],
}


def made_up(monkeypatch, tokens=None, busy=None, **stats) -> Record:
    """The record of sessions that take what is in _SECONDS; FastGen's second call has a captured step.

    `tokens` of a side's second call are others; `busy` has the load of its calls, by process.
    """
    runs = {name: iter(processes) for name, processes in _SECONDS.items()}
    loads = {name: iter((busy or {}).get(name, [[0.0, 0.1]] * 3)) for name in _SECONDS}

    def outcome(name: str, number: int) -> Outcome:
        own = {"transformers.generate": {"accelerated": 1, "fallback": {}}} if name == "fastgen" else {}
        if name == "fastgen" and number == 1:
            own = own | {CAPTURED_STEP: {"accelerated": 1, "fallback": {}}}
        return Outcome(torch.tensor([[5, (tokens or {}).get(name, 0) * (number == 1)]]), stats.get(name, own))

    def run(sides, calls, failed, turn, log):
        found = {}
        for name in sides:
            times = next(runs[name])
            assert len(times) == len(calls)
            peak = {"transformers": 100, "fastgen": 110}.get(name, 50)
            outcomes = [outcome(name, number) for number in range(len(calls))]
            found[name] = Session("7", peak, times, outcomes, next(loads[name]))
        return found

    monkeypatch.setattr(sessions.lockstep, "run", run)
    return run_workload(tiny("opus-mt", further_backends=(), repetitions=3), Context(threads=1))


def test_ratios_are_those_of_pairs_of_calls(monkeypatch):
    record = made_up(monkeypatch)
    assert record.errors == [] and record.identical is True and record.accelerated is True
    # Of the medians of the calls, 6 and 6, 2 and 3; of processes as a whole, 13, 9 and 14, and 4, 8 and 6.
    assert record.metrics["ratio"] == 12 / 5 and record.metrics["ratio_min"] == 9 / 8
    assert record.metrics["first_calls"] == 12 / 5  # there are fewer than five
    assert record.metrics["mean_of_calls"] == 3.0 and record.metrics["slowest"] == 3.0
    assert record.metrics["captured"] == 1 and record.metrics["peak_ratio"] == 1.1
    first, second = record.parameters["calls"]
    assert first["seconds"] == {"transformers": 6.0, "fastgen": 2.0} and not first["captured"] and second["captured"]
    assert "1 calls had a captured step" in record.notes[-1]
    assert not first["disturbed"] and not second["disturbed"]


def test_calls_that_were_disturbed_do_not_count(monkeypatch):
    busy = {"transformers": [[0.5, 0.5], [0, 0.5], [0, 0.5]], "fastgen": [[0, 0], [0.5, 0], [0, 0]]}
    record = made_up(monkeypatch, busy=busy)
    first, second = record.parameters["calls"]
    # Of the first call the last two of the library, and the first and the last of ours; of the second all.
    assert first["seconds"] == {"transformers": 7.0, "fastgen": 2.5} and first["ratio"] == 2.0
    assert second["seconds"] == {"transformers": 6.0, "fastgen": 3.0} and second["ratio"] == 3.0
    assert not first["disturbed"] and second["disturbed"]
    assert record.metrics["ratio"] == record.metrics["first_calls"] == 13 / 5.5


def test_other_tokens_are_noticed(monkeypatch):
    record = made_up(monkeypatch, tokens={"fastgen": 1})
    assert record.identical is False and record.status == "different"
    assert "call 2, run 1 of fastgen: 1 of 1 sequences differ, the first at position 1" in record.notes


def test_a_library_that_runs_fastgen_is_an_error(monkeypatch):
    record = made_up(monkeypatch, transformers={"transformers.generate": {}})
    assert "the unpatched backend ran FastGen's code" in record.errors[0]


def test_a_session_without_its_model(monkeypatch):
    monkeypatch.delenv(smollm2.VARIABLE, raising=False)
    for workload in (_ALL["smollm2"], first_call.WORKLOADS[1]):
        record = run_workload(workload, Context())
        assert record.errors == [] and "python -m benchmarks.smollm2" in record.skipped["the model"]


# ---- first calls

_LIGHT = """
def load(asked):
    ours = asked["settings"] is not None
    stats = {"transformers.generate": {"accelerated": 1, "fallback": {}}} if ours else {}
    return "7", lambda work: {"tokens": [[0, *work["new_tokens"] * [CHANGED * ours]]], "stats": stats}
"""


@pytest.mark.parametrize("changed", [0, 1])
def test_first_calls_are_whole_processes(changed, tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(_LIGHT.replace("CHANGED", str(changed)))
    monkeypatch.setattr(lockstep, "_GENERATE", script)
    (workload,) = (each for each in first_call.WORKLOADS if each.name == "first-call-opus-mt")
    workload = replace(workload, work=replace(workload.work, config=CONFIGS["opus"]), repetitions=2)
    record = run_workload(workload, Context(threads=1))
    assert record.errors == [] and record.accelerated is True and record.identical is (changed == 0)
    assert len(record.backends["fastgen"]["seconds"]) == 2
    assert "the call alone takes" in record.notes[-1]
