"""A small hub on this machine: repositories are the folders of a folder."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    """Answers what the hub's client asks of it to fetch files."""

    folder: ClassVar[Path]
    asked: ClassVar[list[str]]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        """Say how large a file is."""
        self._file(is_head=True)

    def do_GET(self) -> None:
        """Send a file, or the rest of it."""
        self._file(is_head=False)

    def _file(self, *, is_head: bool) -> None:
        repo, _, name = unquote(urlsplit(self.path).path).strip("/").partition("/resolve/main/")
        file = self.folder / repo / name
        if repo.startswith("api/models/") and "/tree/" in repo:  # no folder has more files
            self._answer(b"[]", {"Content-Type": "application/json"})
            return
        if not file.is_file():
            code = "EntryNotFound" if (self.folder / repo).is_dir() else "RepoNotFound"
            self._answer(b"", {"X-Error-Code": code}, HTTPStatus.NOT_FOUND)
            return
        content = file.read_bytes()
        known = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if is_head:
            self._answer(content, {**known, "Accept-Ranges": "bytes"}, is_head=True)
            return
        self.asked.append(name)
        first = int(self.headers.get("Range", "bytes=0-")[len("bytes=") :].partition("-")[0])
        known["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        status = HTTPStatus.PARTIAL_CONTENT if first else HTTPStatus.OK
        self._answer(content[first:], known, status)

    def _answer(
        self,
        content: bytes,
        headers: dict[str, str],
        status: HTTPStatus = HTTPStatus.OK,
        *,
        is_head: bool = False,
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if not is_head and self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def hub(folder: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Serve a folder's folders as repositories.

    Returns:
        Variables by which a process asks this hub, with a cache of its own, and what was asked.
    """
    asked: list[str] = []
    handler = type("Handler", (_Handler,), {"folder": folder, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        cache = folder.with_name(f"{folder.name}-cache")
        yield {"HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}, asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
