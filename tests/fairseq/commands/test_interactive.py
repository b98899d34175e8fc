"""FairSeq's `fairseq-interactive` and FastGen's answer the same."""

from __future__ import annotations

import re
import subprocess
import threading

import pytest

from fastgen.pipeline import fairseq as pipeline
from tests.fairseq.commands.world import ROOT, both_interactive, configuration, printed


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        "--nbest 3 --buffer-size 7 --batch-size 3",
        "--print-alignment --remove-bpe",
        "--sampling --nbest 3 --seed 3 --buffer-size 4 --batch-size 2",
        "--source-lang de --target-lang en --tokenizer moses --buffer-size 100 --max-tokens 80",
        "--print-step --retain-iter-history --buffer-size 30 --batch-size 30",
    ],
)
def test_interactive_prints_the_same(world, options):
    original, ours = both_interactive(world, world.folder / "test.de", *options.split())
    assert ours == original
    assert sum(line.startswith("S-") for line in ours) == 30


def test_interactive_with_soft_alignments(world):
    """FairSeq's command ends with an error there."""
    words = [world.data, "--path", world.model, "--input", world.folder / "test.de", "--cpu", "--max-len-b", 5]
    words += ["--print-alignment", "soft", "--buffer-size", 30, "--batch-size", 30]
    text = printed(lambda: pipeline.interact(configuration("interactive_generation", *words), 0))
    found = re.findall(r"^A-\d+\t(.*)$", text, re.MULTILINE)
    assert len(found) == 30
    assert all(sum(map(float, place.split(","))) == pytest.approx(1, abs=1e-4) for place in found[0].split())


def test_interactive_with_constraints(world, tmp_path):
    source = tmp_path / "source.txt"
    source.write_text("and he said\tLORD\tgod\nin the day\n")
    original, ours = both_interactive(world, source, "--constraints", "--batch-size", 2, "--buffer-size", 2)
    assert ours == original
    assert sum(line.startswith("C-0") for line in ours) == 2


def test_an_interactive_user_is_answered_before_the_next_question(world, programs):
    command = [programs / "python", "-m", "fastgen_cli.fairseq", "interactive", world.data, "--path", world.model]
    with subprocess.Popen(
        [*map(str, command), "--cpu", "--max-len-b", "5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        # An answer that does not come ends the wait for it.
        watch = threading.Timer(600, process.kill)
        watch.start()
        for number in range(2):
            process.stdin.write("and he said\n")
            process.stdin.flush()
            kinds = ""
            while not kinds.endswith("P"):
                line = process.stdout.readline()
                assert line, "it has ended"
                if re.match(rf"[A-Z]-{number}\t", line):
                    kinds += line[0]
            assert kinds == "SWHDP"
        process.stdin.close()
        assert process.wait(timeout=300) == 0
        watch.cancel()
