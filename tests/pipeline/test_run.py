"""Runs from end to end in this process: order, formats, interruption and resumption, bad records, metrics."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

import fastgen
from fastgen import settings
from fastgen.pipeline import SetupError, StrictError, generate_dataset, writers
from fastgen.pipeline.journal import Journal
from tests.pipeline.children import ended_at, interrupted_after

BEAMS = {"num_beams": 2, "max_new_tokens": 5}
SAMPLED = {"do_sample": True, "max_new_tokens": 5}


def run(model, source, output, **options):
    defaults = {"generation": BEAMS, "batch_size": 4, "device": "cpu", "quiet": True, "workers": 0}
    return generate_dataset(model, source, output, **(defaults | options))


def content(path):
    """The bytes of a text output, the rows of a Parquet one."""
    if path.suffix != ".parquet":
        return path.read_bytes()
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


def one_by_one(model, texts):
    """Outputs without any of the pipeline."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    own = AutoModelForSeq2SeqLM.from_pretrained(model)
    return [
        tokenizer.decode(own.generate(**tokenizer(text, return_tensors="pt"), **BEAMS)[0], skip_special_tokens=True)
        for text in texts
    ]


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("name", "drafts"), [("out.txt", True), ("out.jsonl", False)])
def test_prompt_lookup_in_batches(bart, inputs, tmp_path, name, drafts):
    """Which the library refuses: each record would run alone. With scores, calls are plain ones."""
    greedy = {"num_beams": 1, "max_new_tokens": 12}
    plain, drafted = tmp_path / f"plain-{name}", tmp_path / f"drafted-{name}"
    run(bart, inputs, plain, generation=greedy)
    fastgen.reset_stats()
    with settings.changed(captured_step="always"):
        report = run(bart, inputs, drafted, generation=greedy | {"prompt_lookup_num_tokens": 3})
    counts = report.fastgen["stats"]
    assert counts["transformers.generate"]["fallback"] == {}
    assert (counts.get("transformers.speculation", {}).get("drafted", 0) > 0) == drafts
    assert texts_of(drafted) == texts_of(plain)


def texts_of(path):
    lines = path.read_text().splitlines()
    return [json.loads(line)["text"] for line in lines] if path.suffix == ".jsonl" else lines


def test_outputs_are_those_of_each_record_alone_in_input_order(bart, inputs, tmp_path):
    report = run(bart, inputs, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n")[:-1]]
    texts = inputs.read_text().splitlines()
    assert [row["input"] for row in rows] == texts
    assert [row["id"] for row in rows] == list(range(len(texts)))
    assert [row["text"] for row in rows] == one_by_one(bart, texts)
    assert (report.samples, report.skipped) == (len(texts), 0)
    assert report.tokens == sum(sum(row["output_tokens"]) for row in rows)
    assert report.seconds["generate"] >= report.seconds["model"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.jsonl"]


def test_how_records_are_batched_does_not_show_in_the_output(bart, inputs, tmp_path):
    run(bart, inputs, tmp_path / "a.txt", batch_size=4)
    run(bart, inputs, tmp_path / "b.txt", batch_size=13, max_tokens=60)
    run(bart, inputs, tmp_path / "c.txt", batch_size="auto")
    assert content(tmp_path / "a.txt") == content(tmp_path / "b.txt") == content(tmp_path / "c.txt")


@pytest.mark.parametrize(("form", "generation"), [("txt", SAMPLED), ("parquet", BEAMS)])
def test_an_interrupted_run_ends_in_the_same_file(bart, inputs, tmp_path, form, generation):
    options = {"generation": generation, "reference": str(inputs), "metrics": ("chrf", "exact")}
    whole = run(bart, inputs, tmp_path / f"whole.{form}", **options)
    path = tmp_path / f"out.{form}"
    for batches in (0, 3, 2, 1):
        with pytest.raises(KeyboardInterrupt), interrupted_after(batches):
            run(bart, inputs, path, resume=True, **options)
        assert not path.exists()
    assert Path(f"{path}.partial").read_bytes().count(b'{"batch"') == 6
    report = run(bart, inputs, path, resume=True, **options)
    assert content(path) == content(tmp_path / f"whole.{form}")
    assert report.metrics == whole.metrics
    assert report.resumed_samples == 24
    assert not Path(f"{path}.partial").exists()


def test_a_seed_decides_what_is_sampled(bart, inputs, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(bart, inputs, tmp_path / name, generation=SAMPLED, seed=seed)
    assert content(tmp_path / "a") == content(tmp_path / "b") != content(tmp_path / "c")


def test_resuming_with_other_settings_is_refused(bart, inputs, tmp_path):
    with pytest.raises(KeyboardInterrupt), interrupted_after(2):
        run(bart, inputs, tmp_path / "out.txt")
    for change, message in (
        ({"generation": BEAMS | {"num_beams": 3}}, "generation.num_beams was 2 and is now 3"),
        ({"batch_size": 5}, "batch_size was 4 and is now 5"), ({"prefix": "x"}, "prefix was"),
        ({"limit": 5}, "limit was"), ({"weight_dtype": "bf16"}, "weight_dtype"),
        ({"input": tmp_path / "other.txt"}, "input"),
    ):  # fmt: skip
        (tmp_path / "other.txt").write_text("one\n")
        source = change.pop("input", inputs)
        with pytest.raises(SetupError, match=message):
            run(bart, source, tmp_path / "out.txt", resume=True, **change)
    with settings.changed(packed_weights="never"):
        report = run(bart, inputs, tmp_path / "out.txt", resume=True, workers=1, quiet=False)
    assert report.resumed_samples == 8
    assert report.notes[0].startswith("resumed in another environment (settings.packed_weights: ")


def test_every_kind_of_bad_record_is_reported_and_skipped(bart, tmp_path):
    rows = ['{"text": "light"}', "{", '{"text": 5}', '{"text": " "}', '{"t": "x"}', json.dumps({"text": "A" * 90}), "",
            '{"text": "day"}']  # fmt: skip
    source = tmp_path / "in.jsonl"
    source.write_bytes("\n".join(rows).encode() + b"\n\xff\n")
    report = run(bart, source, tmp_path / "out.txt", input_column="text")
    assert (report.samples, report.skipped) == (2, 7)
    lines = (tmp_path / "out.txt").read_text().split("\n")
    assert [bool(line) for line in lines] == [True, False, False, False, False, False, False, True, False, False]
    errors = [json.loads(line) for line in (tmp_path / "out.txt.errors.jsonl").read_text().splitlines()]
    assert [(error["line"], error["error"]) for error in errors] == [
        (2, "malformed"), (3, "wrong-type"), (4, "empty"), (5, "missing-column"), (6, "too-long"), (7, "empty"),
        (9, "invalid-utf8"),
    ]  # fmt: skip
    good = tmp_path / "good.txt"
    good.write_text("light\nday\n")
    run(bart, good, tmp_path / "alone.txt")
    assert [line for line in lines if line] == (tmp_path / "alone.txt").read_text().split("\n")[:-1]


def test_strict_keeps_what_is_in_front_of_the_bad_record(bart, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("fastgen.pipeline.batches.WINDOW_BATCHES", 2)
    lines = inputs.read_text().splitlines()
    inputs.write_text("\n".join([*lines[:12], "", *lines[13:20]]) + "\n")
    for _ in range(2):
        with pytest.raises(StrictError, match=r"in.txt, line 13: the text is empty"):
            run(bart, inputs, tmp_path / "out.txt", strict=True, resume=True)
        assert not (tmp_path / "out.txt").exists()
    report = run(bart, inputs, tmp_path / "out.txt", resume=True)
    assert (report.resumed_samples, report.samples, report.skipped) == (8, 19, 1)


def test_strict_behind_a_run_that_was_not(bart, inputs, tmp_path, monkeypatch):
    """Its bad records count as well, and what it has done is kept."""
    monkeypatch.setattr("fastgen.pipeline.batches.WINDOW_BATCHES", 2)
    lines = inputs.read_text().splitlines()
    inputs.write_text("\n".join([*lines[:2], "", *lines[3:20]]) + "\n")
    with pytest.raises(KeyboardInterrupt), interrupted_after(2):
        run(bart, inputs, tmp_path / "out.txt")
    for _ in range(2):
        with pytest.raises(StrictError, match=r"in.txt, line 3: the text is empty"):
            run(bart, inputs, tmp_path / "out.txt", strict=True, resume=True)
    assert run(bart, inputs, tmp_path / "out.txt", resume=True).resumed_samples > 3


def test_metrics_are_those_of_the_libraries(bart, inputs, tmp_path):
    from sacrebleu import corpus_bleu, corpus_chrf
    from sacremoses import MosesDetokenizer

    outputs = one_by_one(bart, inputs.read_text().splitlines())
    moses = MosesDetokenizer(lang="en")
    outputs = [moses.detokenize(text.split()) for text in outputs]
    references = [text[: len(text) // 2] + "!" for text in outputs]
    reference = tmp_path / "ref.jsonl"
    reference.write_text("".join(json.dumps(text) + "\n" for text in references))
    report = run(
        bart, inputs, tmp_path / "out.jsonl", reference=str(reference), metrics=("bleu", "chrf", "exact"),
        detokenizer="moses", workers=1, score_path=str(tmp_path / "scores.json"), report=str(tmp_path / "report.json"),
    )  # fmt: skip
    assert report.metrics["bleu"] == corpus_bleu(outputs, [references]).score
    assert report.metrics["chrf"] == corpus_chrf(outputs, [references]).score
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores == report.metrics | {"samples": 40, "skipped": 0}
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["samples"] == 40
    assert written["peak_memory_bytes"] > 1 << 20
    assert written["waiting_for_output_share"] >= 0


class Killed(BaseException):
    """Nothing of the program runs after it."""


@pytest.mark.parametrize("moment", ["before-scores", "scores-unfinished", "report", "journal", "after-journal"])
def test_scores_and_report_survive_a_kill_at_the_end(bart, inputs, tmp_path, moment):
    names = ("scores.json", "report.json")
    paths = {"score_path": str(tmp_path / names[0]), "report": str(tmp_path / names[1])}
    options = {"reference": str(inputs), "metrics": ("exact",), **paths}
    replace, remove = os.replace, Journal.remove

    def replaced(source, target):
        name = Path(target).name
        if name == "scores.json" and "scores" in moment:
            if moment == "before-scores":
                Path(source).unlink()
            raise Killed
        replace(source, target)
        if (moment, name) == ("report", "report.json"):
            raise Killed

    def removed(journal):
        if moment == "after-journal":
            remove(journal)
        if moment in ("journal", "after-journal"):
            raise Killed
        remove(journal)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", replaced)
        patch.setattr(Journal, "remove", removed)
        run(bart, inputs, tmp_path / "out.txt", **options)
    assert (tmp_path / "out.txt").exists()
    if moment != "after-journal":
        report = run(bart, inputs, tmp_path / "out.txt", resume=True, **options)
        assert (report.samples, report.batches) == (40, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt", *sorted(names)]
    scores, written = (json.loads((tmp_path / name).read_text()) for name in names)
    assert scores["samples"] == written["samples"] == 40 and scores["exact"] == written["metrics"]["exact"]


def test_scores_that_the_interrupted_run_did_not_write_are_not_replaced(bart, inputs, tmp_path):
    options = {"reference": str(inputs), "metrics": ("exact",), "score_path": str(tmp_path / "scores.json")}
    with ended_at(Journal, "remove", Killed):
        run(bart, inputs, tmp_path / "out.txt", **options)
    ours = (tmp_path / "scores.json").read_text()
    others = {"scores.json": options["score_path"], ".other.json.unfinished": str(tmp_path / "other.json")}
    for name, path in others.items():
        (tmp_path / name).write_text("mine")
        with pytest.raises(SetupError, match=f"{name} exists already"):
            run(bart, inputs, tmp_path / "out.txt", resume=True, **options | {"score_path": path})
        assert (tmp_path / name).read_text() == "mine"
    (tmp_path / "scores.json").write_text(ours)
    run(bart, inputs, tmp_path / "out.txt", resume=True, **options)
    assert not (tmp_path / "out.txt.partial").exists()


@pytest.mark.parametrize("option", ["score_path", "report"])
@pytest.mark.parametrize("moment", ["empty", "whole"])
def test_scores_and_report_of_standard_output_survive_a_kill(bart, inputs, tmp_path, capsys, option, moment):
    path, unfinished = tmp_path / "there.json", tmp_path / ".there.json.unfinished"
    options = {"reference": str(inputs), "metrics": ("exact",), "limit": 2, option: str(path)}
    with ended_at(writers, "sync", Killed):
        run(bart, inputs, "-", **options)
    assert unfinished.stat().st_size
    if moment == "empty":
        unfinished.write_text("")
    run(bart, inputs, "-", **options)
    assert json.loads(path.read_text())["samples"] == 2
    assert not unfinished.exists()
    for mine in ('{"samples": 2}', '{\n  "exact": '):
        unfinished.write_text(mine)
        with pytest.raises(SetupError, match=r".there.json.unfinished exists already \(move it away"):
            run(bart, inputs, "-", overwrite=True, **options)
        assert unfinished.read_text() == mine


def test_a_shorter_standard_input_is_not_resumed(bart, inputs, tmp_path, monkeypatch):
    """Also where the input ends with one of the windows that are done."""
    lines = inputs.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr("fastgen.pipeline.batches.WINDOW_BATCHES", 2)

    def given(count, **options):
        text = io.TextIOWrapper(io.BytesIO(b"".join(lines[:count])))
        monkeypatch.setattr(sys, "stdin", text)
        return run(bart, "-", tmp_path / "out.txt", **options)

    with ended_at(writers, "sync", Killed):
        given(32)
    before = (tmp_path / "out.txt.partial").read_bytes()
    for count in (0, 8, 16, 20, 31):
        with pytest.raises(SetupError, match="the input is not the one that the interrupted run read"):
            given(count, resume=True)
        assert (tmp_path / "out.txt.partial").read_bytes() == before
        assert not (tmp_path / "out.txt").exists()
    assert given(32, resume=True).samples == 32


def test_half_a_surrogate_pair_from_a_tokenizer_does_not_spoil_the_output(bart, inputs, tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(PreTrainedTokenizerFast, "batch_decode", lambda self, rows, **options: ["a\ud800"] * len(rows))
    for form in ("jsonl", "parquet"):
        run(bart, inputs, tmp_path / f"out.{form}", limit=1)
    assert content(tmp_path / "out.parquet")[0]["text"] == "a?"
    assert json.loads(content(tmp_path / "out.jsonl"))["sequences"] == ["a?"]


def test_a_model_in_memory(bart, inputs, tmp_path):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(bart)
    run(model, inputs, tmp_path / "a.txt", tokenizer=AutoTokenizer.from_pretrained(bart))
    run(bart, inputs, tmp_path / "b.txt")
    assert content(tmp_path / "a.txt") == content(tmp_path / "b.txt")
    with pytest.raises(SetupError, match="tokenizer"):
        run(model, inputs, tmp_path / "c.txt")


def test_the_old_name_of_the_options_still_works():
    import fastgen.pipeline

    with pytest.warns(DeprecationWarning, match="RunOptions"):
        assert fastgen.pipeline.Settings is fastgen.pipeline.RunOptions
