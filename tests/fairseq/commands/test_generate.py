"""FairSeq's `fairseq-generate` and FastGen's print the same lines for every option."""

from __future__ import annotations

import copy
import functools
import os
import re
import shutil
from pathlib import Path

import pytest
from fairseq_cli import generate as original_generate

import fastgen
from fastgen.pipeline import fairseq as pipeline
from fastgen_cli import fairseq as commands
from tests.fairseq.commands import world as shared
from tests.fairseq.commands.world import BASE, TINY, World, both, command_of_fairseq, lines, run

pytestmark = pytest.mark.sampled(8)

OPTIONS = [
    "--nbest 3", "--nbest 2 --prefix-size 2 --lenpen 0.6 --unkpen 2", "--print-alignment hard",
    "--print-alignment soft", "--score-reference", "--remove-bpe", "--post-process sentencepiece --scoring sacrebleu",
    "--scoring sacrebleu --sacrebleu-lowercase --sacrebleu-tokenizer intl",
    "--source-lang de --target-lang en --tokenizer moses --moses-no-escape --scoring chrf --no-early-stop",
    "--source-lang de --target-lang en --tokenizer moses --remove-bpe --max-tokens 100",
    "--sampling --nbest 3 --seed 7", "--sampling --sampling-topk 5 --nbest 3 --temperature 1.3 --seed 8",
    "--sampling --sampling-topp 0.8 --nbest 3 --seed 9",
    "--diverse-beam-groups 3 --diverse-beam-strength 0.5 --nbest 3", "--diversity-rate 0.5",
    "--no-repeat-ngram-size 2 --min-len 4", "--match-source-len", "--retain-dropout --seed 4",
    "--gen-subset valid --quiet",
    "--gen-subset train --skip-invalid-size-inputs-valid-test --max-source-positions 7 --batch-size 64 --beam 1",
    "--left-pad-source --left-pad-target", "--num-batch-buckets 2 --max-tokens 200",
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_the_same_lines(world, options):
    if "groups" in options and shared.FIXED:
        pytest.skip("fairseq-fixed's diverse beam search fails when sources leave the batch")
    original, ours = both(world, *options.split())
    assert ours == original
    assert any(line.startswith("Generate ") for line in ours)
    assert ("--quiet" in options) == (len(ours) == 1)


def test_a_whole_command_and_its_workers(world, programs):
    """The commands as they are called, with workers, and with FastGen's generation."""
    options = ["--nbest", 2, "--remove-bpe", "--scoring", "sacrebleu", "--gen-subset", "valid"]
    words = [world.data, "--path", world.model, *BASE, *options]
    command = functools.partial(run, program=programs / "python")
    original, _ = both(world, *options)
    plain = command("fastgen_cli.fairseq", "generate", *words, "--no-fastgen", "--postprocess-workers", 2)
    assert lines(plain.stdout) == original
    assert re.search(r"the model waited \S+ % of the time for input and \S+ % for post-processing", plain.stderr)
    disabled = "not accelerated: FastGen is disabled (--no-fastgen or FASTGEN_DISABLE=1)"
    assert plain.stderr.splitlines()[-1] == disabled
    fast = command("fastgen_cli.fairseq", "generate", *words, "--postprocess-workers", 1)
    assert re.fullmatch(r"accelerated by FastGen: all \d+ calls", fast.stderr.splitlines()[-1])
    same_but_for_rounding(lines(fast.stdout), original)


def same_but_for_rounding(ours: list[str], original: list[str]) -> None:
    """Asserts that lines are equal but for scores, which are within 1e-4."""
    assert len(ours) == len(original)
    for have, want in zip(sorted(ours, key=_unscored), sorted(original, key=_unscored), strict=True):
        if have.startswith("P-"):
            left, right = ([float(score) for score in line.split("\t")[1].split()] for line in (have, want))
        elif shared.NUMBERED.match(have):
            left, right = ([float(line.split("\t")[1])] for line in (have, want))
            assert _unscored(have) == _unscored(want)
        else:
            assert have == want
            continue
        assert left == pytest.approx(right, abs=2e-4)


def _unscored(line: str) -> tuple[str, ...]:
    parts = line.split("\t")
    return (parts[0], *parts[2:]) if parts[0][:2] in ("H-", "D-") else (parts[0],)


def test_results_path(world, tmp_path):
    words = [world.data, "--path", world.model, *BASE, "--results-path", tmp_path, "--gen-subset", "valid"]
    cfg, found = shared.configuration("generation", *words), []
    for command in (original_generate.main, lambda cfg: pipeline.generate(cfg, 0)):
        with fastgen.disabled():
            command(copy.deepcopy(cfg))
        found.append(lines((tmp_path / "generate-valid.txt").read_text()))
        (tmp_path / "generate-valid.txt").unlink()
    assert found[0] == found[1] and len(found[0]) == 10 * 5 + 1


def test_unknown_words_replaced_by_those_of_the_text(world, tmp_path):
    data = shutil.copytree(world.data, tmp_path / "data")
    for side in ("de", "en"):
        shutil.copy(world.folder / f"test.{side}", data / f"test.de-en.{side}")
        for end in ("idx", "bin"):
            (data / f"test.de-en.{side}.{end}").unlink()
    (tmp_path / "aligned").write_text("lord LORD\n")
    words = ["--dataset-impl", "raw", "--replace-unk", tmp_path / "aligned", "--unkpen", 100]
    moved = World(tmp_path)
    moved.data, moved.model = data, world.model
    original, ours = both(moved, *words)
    assert ours == original
    assert not any("<unk>" in line for line in ours if line[:2] in ("S-", "T-"))


def test_steps_of_a_model_that_refines(world, tmp_path):
    command_of_fairseq(
        "train", world.data, "--save-dir", tmp_path, "--task", "translation_lev", "--arch", "cmlm_transformer",
        "--criterion", "nat_loss", "--noise", "full_mask", "--max-update", 2, "--share-all-embeddings", *TINY,
    )  # fmt: skip
    original, ours = both(
        world, "--task", "translation_lev", "--iter-decode-max-iter", 3, "--beam", 1, "--print-step",
        "--retain-iter-history", "--iter-decode-force-max-iter", model=tmp_path / "checkpoint_last.pt",
    )  # fmt: skip
    assert ours == original
    assert {line[0] for line in ours} == set("STHDPIEG")


def test_language_models(language):
    original, ours = both(
        language, "--task", "language_modeling", "--sample-break-mode", "eos", "--max-len-b", 30, "--nbest", 2
    )
    assert ours == original
    assert sum(line.startswith("H-") for line in ours) == 60


def test_an_ensemble_with_a_language_model(world, tmp_path):
    moved = World(tmp_path)
    shutil.copytree(world.data, moved.data)
    # Where FairSeq looks for the language model's.
    dictionary = shutil.copy(moved.data / "dict.en.txt", moved.data / "dict.txt")
    command_of_fairseq(
        "preprocess", "--only-source", "--trainpref", world.folder / "train.en", "--srcdict", dictionary,
        "--validpref", world.folder / "valid.en", "--destdir", tmp_path / "text",
    )  # fmt: skip
    shared.train_language_model(tmp_path / "text", tmp_path / "lm")
    members = Path(f"{world.model}{os.pathsep}{world.model}")
    original, ours = both(moved, "--lm-path", tmp_path / "lm" / "checkpoint_last.pt", "--lm-weight", 0.3, model=members)
    assert ours == original


def test_sources_that_are_left_out_are_counted(world, capsys):
    words = [str(world.data), "--path", str(world.model), *BASE, "--max-source-positions", "7"]
    assert commands.generate([*words, "--skip-invalid-size-inputs-valid-test"]) == 0
    text = capsys.readouterr()
    left_out = 30 - len(re.findall("^S-", text.out, re.MULTILINE))
    assert 0 < left_out < 30 and f"{left_out} of 30 sources were left out" in text.err
