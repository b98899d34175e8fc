"""Whatever is cut off a journal, what is left is whole batches; other settings are refused."""

from __future__ import annotations

import pytest

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.journal import Journal
from fastgen.pipeline.planner import Window
from fastgen.pipeline.readers import BadRecord, Problem

SETTINGS = {"model": "m", "generation": {"num_beams": 4, "bad_words_ids": [[1]]}, "seed": 1}


def result(position):
    return {"position": position, "line": position + 1, "id": position, "text": f"text {position} \ud800 雪"}


def write(path):
    journal = Journal(path, SETTINGS, resume=False)
    journal.begin({"batch_size": 2})
    bad = BadRecord(1, 2, 1, Problem("empty", "the text is empty"))
    journal.window(Window(0, 0, 5, 2, [bad]))
    journal.batch(0, 0, [result(4), result(0)])
    journal.batch(0, 1, [result(3), result(2)])
    journal.window(Window(1, 5, 1, 1, []))
    journal.batch(1, 0, [result(5)])
    journal.close()
    return path


def test_records_come_back_in_input_order(tmp_path):
    journal = Journal(write(tmp_path / "j"), SETTINGS, resume=True)
    assert [found["position"] for found in journal.results()] == [0, 1, 2, 3, 4, 5]
    assert [found["line"] for found in journal.errors()] == [2]
    assert journal.plan == {"batch_size": 2}
    assert journal.resumed.done == {0: {0, 1}, 1: {0}}
    assert journal.count() == 6


def test_cut_anywhere_it_resumes_with_the_batches_that_are_whole(tmp_path):
    path = write(tmp_path / "j")
    whole = path.read_bytes()
    # Among the cuts: right before and right after every line end.
    ends = [end for end in range(len(whole) + 1) if whole[end - 1 : end] == b"\n" or whole[end : end + 1] == b"\n"]
    for size in sorted({*range(0, len(whole) + 1, 7), *ends}):
        path.write_bytes(whole[:size])
        journal = Journal(path, SETTINGS, resume=True)
        lines = whole[:size].count(b"\n")
        done = sum(len(batches) for batches in journal.resumed.done.values())
        assert done == max(0, min(lines - 2, 2)) + (lines == 6)
        assert len(journal.resumed.windows) == (lines >= 2) + (lines >= 5)
        journal.close()
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:lines])


def test_a_run_continues_where_the_cut_was(tmp_path):
    path = write(tmp_path / "j")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    journal = Journal(path, SETTINGS, resume=True)
    journal.begin({"batch_size": 99})
    journal.batch(1, 0, [result(5)])
    journal.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "seed was 1 and is now 2"),
        ({"generation": {"num_beams": 5, "bad_words_ids": [[1]]}}, "generation.num_beams was 4 and is now 5"),
        ({"generation": {"num_beams": 4}}, "generation.bad_words_ids was"),
    ],
)
def test_other_settings_are_refused_and_nothing_is_lost(tmp_path, change, message):
    path = write(tmp_path / "j")
    whole = path.read_bytes()
    with pytest.raises(SetupError, match=message):
        Journal(path, SETTINGS | change, resume=True)
    assert path.read_bytes() == whole


def test_a_second_run_with_the_same_output_is_refused(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path, SETTINGS, resume=False)
    journal.begin({})
    with pytest.raises(SetupError, match="another run"):
        Journal(path, SETTINGS, resume=True)
    journal.close()
    assert path.stat().st_size > 0


def test_a_file_that_is_no_journal_is_left_alone(tmp_path):
    path = tmp_path / "j"
    path.write_text('{"precious": 1}\n')
    with pytest.raises(SetupError, match="not written by fastgen"):
        Journal(path, SETTINGS, resume=True)
    assert path.read_text() == '{"precious": 1}\n'
