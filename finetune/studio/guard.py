"""Who may ask the page: this machine's user, from the page itself, and nobody else.

The server listens on the loopback address, which every process and every web page in the user's
browser can reach. So a request has to carry the random token of the address; its Host has to be the
loopback one, which a name that an attacker points at 127.0.0.1 is not (DNS rebinding); and the
browser must not say that another site sent it.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path

from finetune.loopback import HOST

TOKEN_BYTES = 24
RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._\-]{0,99}"  # of what the page starts; valid in HTML too
SAME_SITE = ("same-origin", "none")  # `none` is a typed address
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report is one file with its own scripts, and reaches nothing.
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def refusal(headers: Mapping[str, str], path: str, *, token: str, port: int) -> str | None:
    """Return why a request is refused; None if it is not.

    Args:
        headers: Of the request, by names in lower case.
        path: Of the address: its first part is the token.
        token: The right one.
        port: Where the server listens.
    """
    hosts = {f"{HOST}:{port}", f"localhost:{port}"}
    if headers.get("host", "") not in hosts:
        return f"the Host header is not {HOST}:{port}"
    origin = headers.get("origin")
    if origin is not None and origin.removeprefix("http://") not in hosts:
        return "another site asks"
    if headers.get("sec-fetch-site", "none") not in SAME_SITE:
        return "another site asks"
    given = path.removeprefix("/").partition("/")[0]
    if not secrets.compare_digest(given.encode(), token.encode()):
        return "the token in the address is wrong: open the address that `sluice studio` printed"
    return None


def inside(folder: Path, name: str) -> Path | None:
    """Return a path in a folder; None if it is outside, by `..` or by a link, or cannot be.

    Args:
        folder: What is shown.
        name: Relative to it.
    """
    if "\0" in name:
        return None
    root = folder.resolve()
    found = (root / name).resolve()
    try:
        found.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:  # such as a name that is too long
        return None
    return found if found.is_relative_to(root) and found != root else None
