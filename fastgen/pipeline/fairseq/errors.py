"""Errors of FairSeq and torch as one line that a user can act on."""

from __future__ import annotations

import functools
import os
import re
import traceback

from fastgen.pipeline import errors
from fastgen.pipeline.errors import one_line


def reason(error: Exception) -> str:
    """Returns the reason on one line. Some messages of FairSeq and torch are long."""
    text = str(error)
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename} is missing"
    if "Error(s) in loading state_dict" in text:
        if "in_proj_weight" in text:  # encoders of FairSeq 0.12.2 save it in addition, and fairseq-fixed refuses it
            return "its encoder was saved by another release of FairSeq, with weights that this one does not know"
        differences = [line.strip() for line in text.splitlines()[1:] if line.strip()]
        return (
            "its weights are those of another architecture, or of a model with other dictionaries "
            f"({len(differences)} differences, first: {differences[0][:200] if differences else text[:200]})"
        )
    architecture = re.search(r"Requested model type: (\S+)", text)
    if architecture is not None:
        return f"FairSeq does not know its architecture {architecture.group(1)!r} (--user-dir imports code that does)"
    if isinstance(error, AssertionError) and re.fullmatch(r"(\d+) < \1", text):
        # FairSeq's generator has reached the greatest length with a source that has no hypothesis.
        return "no hypothesis of a source has come to an end: its scores are no numbers, or no token was allowed"
    if "in DataLoader worker process" in text:
        return text.strip().splitlines()[-1]
    if text.strip():
        return one_line(error)
    frames = traceback.extract_tb(error.__traceback__)  # of an assertion without a message
    where = f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else "an unknown place"
    return f"{type(error).__name__}, at {where}"


explained = functools.partial(errors.explained, reason=reason)
