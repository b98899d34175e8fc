"""Decodes the recordings of requests into the samples that a model reads.

The header is checked first, so that a recording that is too long is refused before its samples take memory. Samples are
read in blocks, so that their original channels and rate are never in memory as a whole.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

from fastgen_serve.concurrency import Turns
from fastgen_serve.errors import BadRequest

FORMATS = ("WAV", "FLAC", "OGG", "MP3")
# soundfile's names for these formats, and the first bytes of such files. soundfile knows two dozen other formats, whose
# readers are never to see a request's data.
_KNOWN = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
_BEGINNINGS = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3")
# Allowed samples a second, and channels.
_RATES, _MOST_CHANNELS = range(4000, 96_001), 8
# Minimum length in seconds: the windows of models are not much shorter.
_SHORTEST = 0.1
# Samples are in [-1, 1]. Values far beyond are not sound, and their powers overflow.
_LOUDEST = 2.0**16
_BLOCK = 2**16
# Programs that do not know the length yet write this or more into a WAV header.
_UNKNOWN_LENGTH = 0x7FFF0000
_PARAM = "file"
# Requests whose recordings are processed at a time: half an hour has 115 MB of samples, and 500 MB of spectra.
AT_ONCE = 2
in_turn = Turns(AT_ONCE, "fastgen-audio").run


def decoded(data: bytes, rate: int, most: float) -> Any:
    """Decodes a file to samples [length], in float32, mono, at this rate.

    Args:
        most: the limit in seconds.

    Raises:
        BadRequest: it is not a recording in one of these formats, is damaged, too long or too short, has an
            unsupported rate or too many channels, or samples that no recording has.
    """
    import numpy
    import soundfile

    if not (data.startswith(_BEGINNINGS) or _begins_with_frame(data)):
        raise _unreadable("no such file")
    _check_whole(data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            _check_header(sound, most)
            samples = numpy.concatenate([*_resampled(sound, rate)])
    except BadRequest:
        raise
    except Exception as error:  # decoders raise arbitrary errors for damaged files
        raise _unreadable(type(error).__name__) from error
    _check_seconds(len(samples) / rate, most)  # the length in an MP3 header is an estimate
    return samples


def _begins_with_frame(data: bytes) -> bool:
    """Returns whether a file begins with a frame of MPEG audio."""
    return len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0


def _check_whole(data: bytes) -> None:
    """Raises BadRequest for a WAV file that ends before its samples do: soundfile would read it without an error."""
    place = 12
    while data.startswith(b"RIFF") and len(data) >= place + 8:
        name, size = struct.unpack_from("<4sI", data, place)
        if name == b"data":
            if place + 8 + size > len(data) and size < _UNKNOWN_LENGTH:
                raise _unreadable("it ends too early")
            return
        place += 8 + size + size % 2


def _check_header(sound: Any, most: float) -> None:
    if sound.format not in _KNOWN:
        raise _unreadable(f"{sound.format} file")
    if sound.samplerate not in _RATES:
        raise BadRequest(
            f"the recording has {sound.samplerate} samples a second: this server takes {_RATES[0]} to {_RATES[-1]}",
            param=_PARAM,
        )
    if sound.channels > _MOST_CHANNELS:
        raise BadRequest(
            f"the recording has {sound.channels} channels: this server takes {_MOST_CHANNELS} at the most", param=_PARAM
        )
    _check_seconds(sound.frames / sound.samplerate, most)


def _check_seconds(seconds: float, most: float) -> None:
    if seconds > most:
        raise BadRequest(
            f"the recording is longer than {most:g} s, or does not say how long it is: send it in parts", param=_PARAM
        )
    if seconds < _SHORTEST:
        raise BadRequest(f"the recording has {seconds:.3g} s: send {_SHORTEST:g} s at the least", param=_PARAM)


def _resampled(sound: Any, rate: int) -> Iterator[Any]:
    """Yields the samples of a file block by block, in mono, at this rate."""
    import soxr

    stream = None if sound.samplerate == rate else soxr.ResampleStream(sound.samplerate, rate, 1, dtype="float32")
    left = sound.frames
    while left > 0:
        block = sound.read(min(_BLOCK, left), dtype="float32", always_2d=True).mean(axis=1)
        left = left - len(block) if len(block) else 0  # the length of an MP3 file is an estimate
        if not (abs(block) <= _LOUDEST).all():  # also true for NaN
            raise BadRequest("the recording has samples that are no numbers, or far too large", param=_PARAM)
        yield block if stream is None else stream.resample_chunk(block, last=left == 0)


def _unreadable(reason: str) -> BadRequest:
    return BadRequest(f"the file cannot be read: send a whole one of {', '.join(FORMATS)} ({reason})", param=_PARAM)
