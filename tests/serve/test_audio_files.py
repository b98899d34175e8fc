"""Files of recordings: what is read of them, and that a hostile one is refused with one line."""

from __future__ import annotations

import tracemalloc

import numpy
import pytest
import soxr

from fastgen_serve import audio
from fastgen_serve.errors import BadRequest
from tests.serve import recordings
from tests.serve.recordings import HOSTILE, RATE, file, sound

MOST_SECONDS = 20
SHORT = sound(1.5, 2)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_formats(kind: str) -> None:
    data = file(SHORT, kind=kind)
    samples = audio.decoded(data, RATE, MOST_SECONDS)
    assert samples.dtype == numpy.float32 and samples.shape == SHORT.shape
    assert abs(samples - SHORT).max() < {"WAV": 1e-4, "FLAC": 1e-4, "OGG": 0.3, "MP3": 0.3}[kind]


@pytest.mark.parametrize(("rate", "kind"), [(8_000, "WAV"), (44_100, "FLAC"), (48_000, "OGG"), (96_000, "WAV")])
def test_rates_and_channels(rate: int, kind: str) -> None:
    both = numpy.stack([sound(9, 1, rate), sound(9, 2, rate)], axis=1)
    found = audio.decoded(file(both, rate, kind, "FLOAT" if kind == "WAV" else None), RATE, MOST_SECONDS)
    expected = soxr.resample(both.mean(axis=1), rate, RATE)
    assert found.shape == expected.shape == (9 * RATE,)
    assert abs(found - expected).max() < (0.3 if kind == "OGG" else 1e-3)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_recording(name: str) -> None:
    with pytest.raises(BadRequest) as refused:
        audio.decoded(HOSTILE[name](), RATE, MOST_SECONDS)
    assert refused.value.param == "file" and "\n" not in refused.value.message
    assert SAID.get(name, "") in refused.value.message


SAID = {
    "no sound": "cannot be read: send a whole one of WAV, FLAC, OGG, MP3", "wav cut": "ends too early",
    "wav of 10 hours": "ends too early", "flac of 10 hours": "longer than 20 s", "no samples": "has 0 s",
    "192 kHz": "192000 samples a second: this server takes 4000 to 96000",
    "32 channels": "32 channels: this server takes 8", "no numbers": "no numbers, or far too large",
}  # fmt: skip


def test_damaged_files_never_end_the_process() -> None:
    """Bytes of good files are changed, wherever: there are samples, or it is refused."""
    draw = numpy.random.default_rng(0)
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        whole = numpy.frombuffer(file(sound(0.5), kind=kind), "uint8")
        for size in (len(whole), 200, 60):  # anywhere, or in the header
            for _ in range(8):
                data = whole.copy()
                data[draw.integers(0, size, 4)] = draw.integers(0, 256, 4)
                try:
                    assert isinstance(audio.decoded(data.tobytes(), RATE, MOST_SECONDS), numpy.ndarray)
                except BadRequest as refused:
                    assert "\n" not in refused.message


def test_what_is_too_long_takes_no_memory() -> None:
    long = file(numpy.zeros(RATE * 3600, "int16"), kind="FLAC")
    audio.decoded(file(SHORT), RATE, MOST_SECONDS)  # which imports what reads files
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="longer than 20 s"):
            audio.decoded(long, RATE, MOST_SECONDS)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(long) + 1_000_000
        tracemalloc.reset_peak()
        wide = file(numpy.zeros((96_000 * 15, 8), "int16"), 96_000, "FLAC")
        tracemalloc.reset_peak()
        assert len(audio.decoded(wide, RATE, MOST_SECONDS)) == 15 * RATE
        assert tracemalloc.get_traced_memory()[1] < 15_000_000, "46 MB in its own rate and channels"
    finally:
        tracemalloc.stop()


def test_a_wav_file_that_does_not_know_its_length() -> None:
    """As programs write them to a pipe."""
    for size in (0xFFFFFFFF, 0x7FFFFFFF):
        data = recordings.claiming(file(SHORT), size)
        assert len(audio.decoded(data, RATE, MOST_SECONDS)) == len(SHORT)
