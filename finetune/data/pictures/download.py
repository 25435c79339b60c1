"""Images from servers, which a recipe has to allow."""

from functools import lru_cache
from http.client import HTTPException
from time import monotonic
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

from finetune.data.pictures.decode import MOST_BYTES, too_many_bytes
from finetune.errors import RowError

WAIT_S, MOST_S = 20.0, 120.0
_BLOCK_BYTES = 2**16


@lru_cache(maxsize=8)
def downloaded(url: str) -> bytes:
    """Return what a server gives for a URL; the answers of one row are read with one prompt.

    Raises:
        RowError: It gives nothing, too much, or too slowly; to follow the image's name.
    """
    deadline = monotonic() + MOST_S
    content = bytearray()
    try:
        request = Request(url, headers={"User-Agent": "sluice"})
        with _opener().open(request, timeout=WAIT_S) as response:
            while block := response.read1(_BLOCK_BYTES):
                content += block
                if len(content) > MOST_BYTES:
                    raise too_many_bytes(len(content))
                if monotonic() > deadline:
                    raise TimeoutError(f"more than {MOST_S:g} s")
            missing = response.length
    except (OSError, HTTPException, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RowError(
            f"cannot be downloaded ({reason}): correct its URL, or name a file"
        ) from None
    if missing:
        raise RowError(f"cannot be downloaded ({missing} bytes are missing): name a file")
    return bytes(content)


def _opener() -> OpenerDirector:
    """Return what follows URLs and redirects of http and https, and no others."""
    opener = OpenerDirector()
    for handler in (
        ProxyHandler(),
        UnknownHandler(),
        HTTPHandler(),
        HTTPSHandler(),
        HTTPDefaultErrorHandler(),
        HTTPRedirectHandler(),
        HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener
