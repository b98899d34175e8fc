"""The command line: what it understands, what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fastgen.pipeline.generation import options as generation_options
from fastgen_cli.generate import build_parser, main, normalise, parse
from tests import survey
from tests.pipeline import tiny
from tests.pipeline.children import finished, in_child

FAST = ["--num-beams", "2", "--max-new-tokens", "5", "--device", "cpu", "--batch-size", "4"]


def call(*words):
    return main([str(word) for word in words])


def test_every_generation_field_is_an_option_and_none_is_shadowed():
    from transformers import GenerationConfig

    own = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    found = build_parser()._option_string_actions
    for name in own:
        option = f"--{name.replace('_', '-')}"
        assert found[option].dest == option


def test_an_option_that_only_a_later_release_has(monkeypatch):
    monkeypatch.setattr(generation_options, "known_names", lambda: frozenset({"new_kind"}))
    assert parse(["m", "i", "o", "--new_kind", "3"])[1] == {"new_kind": 3}


def test_options_reach_the_settings():
    given, generation = parse(
        ["--do-sample", "m", "i", "o", "--early_stopping", "never", "--num_beams=4", "--length-penalty", "-1.5",
         "--no-use-cache", "--bad-words-ids", "[[1]]", "--text_column", "article", "--fp16", "--bs", "auto",
         "--metrics", "bleu,exact", "--renormalize_logits", "False", "--source_prefix", "a_b: "]
    )  # fmt: skip
    assert (given["model"], given["input"], given["output"]) == ("m", "i", "o")
    assert generation == {
        "do_sample": True, "early_stopping": "never", "num_beams": 4, "length_penalty": -1.5, "use_cache": False,
        "bad_words_ids": [[1]], "renormalize_logits": False,
    }  # fmt: skip
    assert (given["input_column"], given["dtype"], given["batch_size"]) == ("article", "fp16", "auto")
    assert (given["metrics"], given["prefix"]) == (("bleu", "exact"), "a_b: ")


def test_words_after_a_double_dash_are_left_alone():
    assert normalise(["--do_sample", "x_y", "--", "--a_b"], {"--do-sample"}) == [
        "--do-sample=true", "x_y", "--", "--a_b",
    ]  # fmt: skip


def test_nothing_is_replaced_without_overwrite(bart, inputs, tmp_path, one_line):
    source, out = tmp_path / "some.txt", tmp_path / "out.txt"
    source.write_text("let there be light\n\nthe earth\n")
    files = {"--score-path": tmp_path / "s.json", "--report": tmp_path / "r.json"}
    old = [Path(f"{out}.errors.jsonl"), *files.values()]
    words = [bart, source, out, *FAST, "--reference", source, "--metrics", "exact", "--quiet"]
    for option, path in files.items():
        words += [option, path]
    for path in old:
        path.write_text('{"line": "old"}')
        for resume in ([], ["--resume"]):
            assert call(*words, *resume) == 2
            assert f"{path} exists already (--overwrite replaces it)" in one_line()
        assert path.read_text() == '{"line": "old"}'
        path.unlink()
    for path in old:
        path.write_text('{"line": "old"}')
    assert call(*words, "--overwrite") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.txt", "out.txt", "out.txt.errors.jsonl", "r.json", "s.json", "some.txt",
    ]  # fmt: skip
    assert [
        json.loads(path.read_text())[name] for path, name in zip(old, ("line", "samples", "samples"), strict=True)
    ] == [2, 2, 2]
    words[1] = inputs
    words[words.index("--reference") + 1] = inputs
    assert call(*words, "--overwrite") == 0
    assert not old[0].exists()


def test_what_is_read_or_written_already_is_never_replaced(bart, inputs, tmp_path, one_line):
    out, config = tmp_path / "out.txt", tmp_path / "g.json"
    config.write_text("{}")
    (tmp_path / "link.txt").symlink_to(inputs)
    (tmp_path / "hard.txt").hardlink_to(inputs)
    reference = tmp_path / "reference.txt"
    reference.write_bytes(inputs.read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for words, message in (
        (["--report", inputs], "INPUT and the report are"),
        (["--report", tmp_path / "link.txt"], "INPUT and the report are"),
        (["--report", tmp_path / "hard.txt"], "INPUT and the report are"),
        (["--score-path", reference], "the reference and the score path are"),
        (["--report", config, "--generation-config", config], "the generation config and the report are"),
        (["--report", out], "OUTPUT and the report are"),
        (["--report", f"{out}.errors.jsonl"], "the error file of OUTPUT and the report are"),
        (["--report", f"{out}.partial"], "the work file of OUTPUT and the report are"),
        (["--report", tmp_path / "x", "--score-path", tmp_path / "." / "x"], "the score path and the report are"),
    ):
        for overwrite in ([], ["--overwrite"]):
            assert call(bart, inputs, out, "--reference", reference, "--quiet", *words, *overwrite) == 2, words
            said = one_line()
            assert message in said and "the same file" in said
    errors = tmp_path / "out.txt.errors.jsonl"
    before[errors] = b"{}\n"
    errors.write_bytes(before[errors])
    assert call(bart, errors, out, "--overwrite") == 2
    assert "INPUT and the error file of OUTPUT are the same file" in one_line()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "name", ["out.txt.partial", "out.txt.errors.jsonl", "out.txt.errors.jsonl.partial", ".out.txt.unfinished"]
)
@pytest.mark.parametrize("options", [[], ["--resume"], ["--overwrite"], ["--resume", "--overwrite"]])
def test_a_file_that_fastgen_did_not_write_is_never_replaced(bart, inputs, tmp_path, one_line, name, options):
    mine = tmp_path / name
    for content in ("my notes\n", '{"journals": 1}\n', "\0"):
        mine.write_text(content)
        assert call(bart, inputs, tmp_path / "out.txt", *FAST, *options) == 2
        assert str(mine) in one_line()
        assert mine.read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in.txt", name])


def test_a_kill_when_the_output_was_in_place_already(bart, inputs, tmp_path, capsys, one_line):
    """Between the last rename and the removal of the work file: the output is complete."""
    out = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastgen.pipeline.journal.Journal.remove", lambda self: os._exit(9))
        assert finished(in_child(lambda: call(bart, inputs, out, *FAST, "--quiet"))) == 9
    whole = out.read_bytes()
    capsys.readouterr()
    assert call(bart, inputs, out, *FAST) == 2
    assert "is left from an interrupted run (--resume continues it" in one_line()
    assert call(bart, inputs, out, *FAST, "--resume", "--quiet") == 0
    assert "the output is complete" in one_line()
    assert out.read_bytes() == whole
    assert not Path(f"{out}.partial").exists()
    # Another file of that name is nobody's output.
    assert call(bart, inputs, out, *FAST, "--resume") == 2
    assert "exists already, and no run is interrupted, so there is nothing to resume" in one_line()


def test_an_unwritable_output(bart, inputs, tmp_path, one_line, monkeypatch):
    # As root every file can be written, so the answer of the system is given for it.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert call(bart, inputs, tmp_path / "out.txt") == 2
    assert "permission denied" in one_line()
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert call(bart, inputs, tmp_path / "out.txt") == 2
    assert "read-only file system" in one_line()
    monkeypatch.delattr("os.statvfs")
    assert call(bart, inputs, tmp_path / "out.txt") == 2
    assert "permission denied" in one_line()


def test_done_and_skipped_and_strict(bart, tmp_path, capsys, one_line):
    source = tmp_path / "in.txt"
    source.write_text("light\nday\n")
    assert call(bart, source, tmp_path / "out.txt", *FAST) == 0
    said = capsys.readouterr().err
    assert "samples/s" in said
    assert "% for post-processing" in said
    source.write_text("light\n\nday\n")
    assert call(bart, source, tmp_path / "out.txt", *FAST, "--quiet", "--overwrite") == 1
    assert "1 of 3 records skipped" in one_line()
    assert (tmp_path / "out.txt").read_text().split("\n")[1] == ""
    assert call(bart, source, tmp_path / "strict.txt", *FAST, "--quiet", "--strict") == 1
    assert "line 2: the text is empty" in one_line()
    assert not (tmp_path / "strict.txt").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "accelerated by FastGen: all 10 calls"),
        (["--metrics", "exact", "--reference", "INPUT"], "accelerated by FastGen: all 10 calls"),
        (["--no-fastgen"], "not accelerated: FastGen is disabled (--no-fastgen or FASTGEN_DISABLE=1)"),
        (["--no-use-cache"], "not accelerated: no K/V cache (use_cache=False)"),
        (["--quiet"], None),
    ],
)
def test_the_last_line_says_whether_fastgen_accelerated(bart, inputs, tmp_path, capsys, words, expected):
    import fastgen

    fastgen.reset_stats()
    words = [inputs if word == "INPUT" else word for word in words]
    assert call(bart, inputs, tmp_path / "out.txt", *FAST, *words) == 0
    said = capsys.readouterr().err.splitlines()
    if expected is None:
        assert not said
        return
    done, _, whether = said[-1].partition("; ")
    assert re.fullmatch(rf"{re.escape(str(tmp_path / 'out.txt'))}: 40 records in [\d.]+ s, [\d.]+ tokens/s", done)
    assert whether == expected and survey.says_accelerated(said[-1]) == expected.startswith("accelerated")


def test_the_last_line_where_fastgen_is_not_hooked(bart, inputs, tmp_path, capsys, monkeypatch):
    from transformers.generation.utils import GenerationMixin

    import fastgen
    from fastgen import patching

    monkeypatch.setattr(GenerationMixin, "generate", patching.original_of(GenerationMixin.generate))
    fastgen.reset_stats()
    assert call(bart, inputs, tmp_path / "out.txt", *FAST) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[-1].endswith("; not accelerated: FastGen was not called (python -m fastgen says what it hooks)")


def test_debug_shows_where(inputs, tmp_path):
    from fastgen.pipeline import SetupError

    with pytest.raises(SetupError):
        call(tmp_path / "none", inputs, tmp_path / "out.txt", "--debug")


def begun(python: str | Path, words: list[Any], partial: Path, batches: int) -> subprocess.Popen[str]:
    """A command in a process of its own, which has finished so many batches."""
    process = subprocess.Popen(
        [str(python), "-m", "fastgen_cli.generate", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background ignore interrupts, and what they start would too. The command yields the
        # processor to this process, which is to see it in the middle.
        preexec_fn=lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), os.nice(5)),
    )
    deadline = time.monotonic() + 600
    while not (partial.exists() and partial.read_bytes().count(b'{"batch"') >= batches):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_an_interrupted_and_a_killed_command_are_resumed_to_the_same_file(bart, tmp_path, programs):
    """In the middle of sampling with a worker process. What is replaced stays as it was until the run is complete."""
    source, out, report = tmp_path / "in.txt", tmp_path / "out.jsonl", tmp_path / "report.json"
    source.write_text("\n".join(["", "", *tiny.sentences(400)]) + "\n")
    errors, partial = Path(f"{out}.errors.jsonl"), Path(f"{out}.partial")
    for path in (out, errors, report):
        path.write_text('{"line": "old"}')
    options = ["--do-sample", "--max-new-tokens", "10", "--batch-size", "4", "--device", "cpu", "--quiet",
               "--detokenizer", "moses", "--workers"]  # fmt: skip
    words = [bart, source, out, *options, "1", "--overwrite", "--report", report]
    process = begun(programs / "python", words, partial, 3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert said.startswith("fastgen-generate: interrupted; to continue: fastgen-generate --resume "), said
    assert said.count("\n") == 1
    assert Path(f"{errors}.partial").read_text().count("\n") == 2
    process = begun(sys.executable, [*words, "--resume"], partial, partial.read_bytes().count(b'{"batch"') + 3)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert {path.read_text() for path in (out, errors, report)} == {'{"line": "old"}'}
    assert 6 <= partial.read_bytes().count(b'{"batch"') < 100
    done = partial.read_bytes().count(b'{"position"')
    assert call(*words, "--resume") == 1
    assert json.loads(report.read_text())["resumed_samples"] == done
    assert call(bart, source, tmp_path / "whole.jsonl", *options, "0") == 1
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert errors.read_bytes() == (tmp_path / "whole.jsonl.errors.jsonl").read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".partial", ".unfinished")]
