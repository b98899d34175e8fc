"""`fastgen-generate` with files of FairSeq's."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest

from fastgen.pipeline import PipelineError
from fastgen.pipeline import fairseq as pipeline
from fastgen_cli.generate import main as generate_any
from tests.fairseq.commands.world import BASE, configuration, lines, one_line, printed
from tests.pipeline.children import finished, in_child, interrupted_after

# Sentences, where any do.
FEW = ["--gen-subset", "valid"]


@pytest.fixture(scope="module")
def expected(world) -> list[str]:
    """The best output of every source, from the lines of the command that prints them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        cfg = configuration("generation", world.data, "--path", world.model, *BASE)
    text = printed(lambda: pipeline.generate(cfg, 0))
    found = {int(line.split("\t")[0][2:]): line.split("\t")[2] for line in lines(text) if line.startswith("D-")}
    assert len(found) == 30
    return [found[number] for number in range(30)]


def test_a_data_directory(world, expected, tmp_path, capfd):
    for name in ("out.txt", "out.jsonl"):
        assert generate_any([str(world.model), str(world.data), str(tmp_path / name), *BASE, "--nbest", "2"]) == 0
    assert (tmp_path / "out.txt").read_text().splitlines() == expected
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["text"] for record in records] == expected
    assert all(len(record["sequences"]) == len(record["scores"]) == 2 for record in records)
    reference = (world.folder / "test.en").read_text().splitlines()[3]
    assert records[3]["reference"].split()[0] == reference.split()[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.txt"]
    said = capfd.readouterr().err
    assert "BLEU4 = " in said and said.splitlines()[-1].startswith("accelerated by FastGen: all ")
    assert generate_any([str(world.model), str(world.data), "-", *BASE]) == 0
    assert capfd.readouterr().out.splitlines() == expected


def test_an_interrupt_leaves_what_is_finished(world, tmp_path, capsys):
    with interrupted_after(2, pipeline.run.Generate, "compute"):
        assert generate_any([str(world.model), str(world.data), str(tmp_path / "out.txt"), *BASE]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt.partial"]
    assert len(lines((tmp_path / "out.txt.partial").read_text())) == 16 * 5
    assert f"what was finished is in {tmp_path / 'out.txt.partial'}" in capsys.readouterr().err


def test_a_failure_in_a_text_leaves_what_is_finished(world, tmp_path, capsys):
    """Also of lines whose buffer has not been finished."""
    for path in (world.model, *world.data.glob("dict.*")):
        shutil.copy(path, tmp_path)
    words = [str(tmp_path / world.model.name), str(world.folder / "test.de"), str(tmp_path / "out.txt")]
    with interrupted_after(2, pipeline.run.Interactive, "compute", PipelineError("broken")):
        assert generate_any([*words, "-s", "de", "-t", "en", "--cpu", "--batch-size", "8"]) == 2
    found = [line for line in (tmp_path / "out.txt.partial").read_text().splitlines() if line[:2] == "D-"]
    assert len(found) == 16
    assert "fastgen-generate: broken" in capsys.readouterr().err


def test_a_text_with_the_dictionaries_beside_the_checkpoint(world, expected, tmp_path):
    for path in (world.model, *world.data.glob("dict.*")):
        shutil.copy(path, tmp_path)
    model, output = str(tmp_path / world.model.name), tmp_path / "out.txt"
    words = [model, str(world.folder / "test.de"), str(output), "-s", "de", "-t", "en", *BASE]
    assert generate_any([word for word in words if word not in ("--num-workers", "0")]) == 0
    assert output.read_text().splitlines() == expected


def test_fairseqs_own_arguments(world, capfd):
    assert generate_any([str(world.data), "--path", str(world.model), *BASE, *FEW]) == 0
    assert len(lines(capfd.readouterr().out)) == 10 * 5 + 1


def test_nothing_is_replaced(world, tmp_path, capsys):
    output = tmp_path / "out.txt"
    output.write_text("old")
    words = [str(world.model), str(world.data), str(output), *BASE, *FEW]
    assert generate_any(words) == 2
    assert "exists already (--overwrite replaces it)" in one_line(capsys, "fastgen-generate")
    assert output.read_text() == "old"
    assert generate_any([*words, "--overwrite"]) == 0
    assert output.read_text() != "old"


@pytest.mark.parametrize("name", ["out.txt.partial", ".out.txt.unfinished"])
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_a_file_that_fastgen_did_not_write_is_never_replaced(world, tmp_path, capsys, name, overwrite):
    (tmp_path / name).write_text("my notes\n")
    assert generate_any([str(world.model), str(world.data), str(tmp_path / "out.txt"), *BASE, *overwrite]) == 2
    assert str(tmp_path / name) in one_line(capsys, "fastgen-generate")
    assert (tmp_path / name).read_text() == "my notes\n"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("moment", ["lines", "output"])
def test_what_a_killed_run_has_left_is_replaced_when_asked(world, tmp_path, capsys, moment):
    output = tmp_path / "out.txt"
    words = [str(world.model), str(world.data), str(output), *BASE, *FEW]
    where = "fastgen.pipeline.writers." + ("sync" if moment == "output" else "placed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, lambda *_: os._exit(9))
        assert finished(in_child(lambda: generate_any([*words, "--postprocess-workers", "0"]))) == 9
    left = {"out.txt.partial", *([".out.txt.unfinished"] if moment == "output" else [])}
    assert {path.name for path in tmp_path.iterdir()} == left
    capsys.readouterr()
    assert generate_any(words) == 2
    assert "out.txt.partial exists already (--overwrite replaces it)" in one_line(capsys, "fastgen-generate")
    assert {path.name for path in tmp_path.iterdir()} == left
    assert generate_any([*words, "--overwrite"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_a_text_without_dictionaries(world, tmp_path, capsys):
    words = [str(world.model), str(world.folder / "test.de"), str(tmp_path / "out.txt"), "--cpu"]
    assert generate_any(words) == 2
    assert "no dict.*.txt beside" in one_line(capsys, "fastgen-generate")
