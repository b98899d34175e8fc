"""Decodes the images of requests. They are data: URIs in the request, so that no request reaches the network or a file.

The data's length and the header are checked first, so that an image that is too large is refused before its pixels take
memory.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastgen_serve.concurrency import Turns
from fastgen_serve.errors import BadRequest
from fastgen_serve.settings import ServeSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# The highest aspect ratio: processors scale an image by its shorter side.
_LONGEST = 20
# The most scans of a progressive JPEG: each takes as long as decoding all pixels. Encoders write a dozen.
_MOST_SCANS = 100
_START_OF_SCAN = b"\xff\xda"
# The beginning of a data: URI. Its parts are bounded to keep the match from backtracking over a long text.
_DATA = re.compile(r"data:[\w.+-]{0,32}/?[\w.+-]{0,64};base64,", re.IGNORECASE | re.ASCII)
_PARAM = "messages"
# Requests whose images are processed at a time: each holds them in memory. Tokenisation has threads of its own.
AT_ONCE = 4
in_turn = Turns(AT_ONCE, "fastgen-images").run
T = TypeVar("T")


def decoded(urls: Sequence[str], settings: ServeSettings) -> list[Any]:
    """Decodes the images of a request, in RGB and upright, as Transformers reads those of files.

    Raises:
        BadRequest: there are too many, or one is not a data: URI, is too large, or is not an image of these formats.
    """
    check_number(urls, settings)
    opened = [_whole(number, _opened, _data(number, url, settings)) for number, url in enumerate(urls, 1)]
    pixels = sum(image.width * image.height for image in opened)
    if pixels > settings.max_image_pixels:
        raise BadRequest(
            f"the images have {pixels} pixels together: this server takes {settings.max_image_pixels} at the most",
            param=_PARAM,
        )
    for number, image in enumerate(opened, 1):
        if max(image.size) > _LONGEST * min(image.size):
            raise BadRequest(
                f"image {number} has {image.width} x {image.height} pixels: one side is {_LONGEST} times the other at "
                "the most",
                param=_PARAM,
            )
    return [_whole(number, _upright, image) for number, image in enumerate(opened, 1)]


def check_number(urls: Sequence[str], settings: ServeSettings) -> None:
    """Raises BadRequest if a request has more images than the server allows."""
    if len(urls) > settings.max_images:
        raise BadRequest(
            f"the request has {len(urls)} images: this server takes {settings.max_images} at the most", param=_PARAM
        )


def _data(number: int, url: str, settings: ServeSettings) -> bytes:
    head = _DATA.match(url)
    if head is None:
        raise BadRequest(
            f"image {number} is no data: URI (data:image/png;base64,...): this server fetches nothing, neither from "
            "the network nor from files",
            param=_PARAM,
        )
    if (len(url) - head.end()) // 4 * 3 > settings.max_image_bytes:
        raise BadRequest(f"image {number} has more than {settings.max_image_bytes} bytes", param=_PARAM)
    return _whole(number, lambda text: base64.b64decode(text, validate=True), url[head.end() :])


def _whole(number: int, read: Callable[[Any], T], value: Any) -> T:
    """Applies `read` to a part of an image. Raises BadRequest if that part is damaged."""
    try:
        return read(value)
    except Exception as error:  # decoders raise arbitrary errors for damaged files
        raise BadRequest(
            f"image {number} cannot be read: give the base64 of a file of {', '.join(FORMATS)} "
            f"({type(error).__name__})",
            param=_PARAM,
        ) from error


def _opened(data: bytes) -> Any:
    """Opens an image, which reads its header only."""
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.format in ("JPEG", "MPO") and data.count(_START_OF_SCAN) > _MOST_SCANS:
        raise ValueError("too many scans")
    return image


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image).convert("RGB")
