"""A small hub on this machine: repositories are the folders of a folder.

A folder `own/model` is a model, `datasets/own/rows` a data set. `own/model@v1` is what another
revision of it holds. A commit is named by what a folder holds, so a main branch that has moved
leaves its old commit where a folder with another revision has it. An empty file `.gated` or
`.private` in a folder keeps it for the token `member`; `writer` may also push.
"""

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from finetune.hub.repository import look_up

KINDS = ("models", "datasets")
PIECE = 2**20


def commit_of(folder: Path) -> str:
    """Return the commit of what a folder holds."""
    files = [(str(file.relative_to(folder)), file.stat()) for file in files_of(folder)]
    seen = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])
    return hashlib.sha1(seen.encode(), usedforsecurity=False).hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Return the files that a repository gives."""
    found = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in found if not file.name.startswith("."))


@dataclass(kw_only=True)
class Hub:
    """A hub that answers."""

    folder: Path  # with its repositories
    variables: dict[str, str] = field(default_factory=dict)  # ask it, with a cache of one's own
    asked: list[str] = field(default_factory=list)  # the files that were fetched
    starts: list[tuple[str, int]] = field(default_factory=list)  # and from which byte
    cuts: list[int] = field(default_factory=list)  # bytes after which weights break off, each once
    piece_s: float = 0.0  # seconds that each MiB of weights takes
    created: list[dict[str, Any]] = field(default_factory=list)  # what was asked to be created


class _Handler(BaseHTTPRequestHandler):
    """Answers what the hub's client asks of it."""

    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        """Say how large a file is."""
        self._get()

    def do_GET(self) -> None:
        """Send a file, the rest of it, or what a repository holds."""
        self._get()

    def do_POST(self) -> None:
        """Create a repository, or put files into one."""
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.endswith("paths-info/main"):
            self._json([])
        elif self._token not in ("writer", "reader"):
            self._refuse("", HTTPStatus.UNAUTHORIZED)
        elif self._token == "reader":
            self._refuse("", HTTPStatus.FORBIDDEN)
        else:
            self._write(path, content)

    @property
    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _get(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if self._token == "expired":
            said = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._answer(b"", said, HTTPStatus.UNAUTHORIZED)
        elif path == "api/whoami-v2":
            self._json({"name": "own", "type": "user", "orgs": []})
        elif path.startswith("api/"):
            kind, _, rest = path.removeprefix("api/").partition("/")
            self._api(rest, prefix="" if kind == "models" else f"{kind}/")
        else:
            repo, _, rest = path.partition("/resolve/")
            self._file(repo, *_revision_and_name(rest))

    # ------------------------------------------------------------------------------ repositories

    def _found(self, repo: str, revision: str = "main") -> Path | None:
        """Return the folder of a revision; answer by an error if there is none."""
        main = self.hub.folder / repo
        if not main.is_dir() or ((main / ".private").exists() and self._token != "member"):
            self._refuse("RepoNotFound", HTTPStatus.NOT_FOUND)
            return None
        for folder in (main, *sorted(main.parent.glob(f"{main.name}@*"))):
            name = folder.name.partition("@")[2].replace("%", "/") or "main"
            if revision in (name, commit_of(folder)):
                return folder
        self._refuse("RevisionNotFound", HTTPStatus.NOT_FOUND)
        return None

    def _is_closed(self, repo: str) -> bool:
        return (self.hub.folder / repo / ".gated").exists() and self._token != "member"

    def _api(self, path: str, *, prefix: str) -> None:
        repo, what = "/".join(path.split("/")[:2]), path.split("/")[2:]
        repo = prefix + repo
        has_revision = what[:1] in (["revision"], ["tree"])
        revision, below = _revision_and_name("/".join(what[1:]) if has_revision else "main")
        folder = self._found(repo, revision)
        if folder is None:
            return
        if what == ["auth-check"] and self._is_closed(repo):
            self._refuse("GatedRepo", HTTPStatus.FORBIDDEN)
        elif what == ["refs"]:
            main = self.hub.folder / repo
            names = [one.name.partition("@")[2] for one in main.parent.glob(f"{main.name}@*")]
            branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": commit_of(main)}
            tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": "0" * 40} for n in names]
            self._json({"branches": [branch], "tags": tags, "converts": [], "pullRequests": []})
        elif below and not (folder / below).is_dir():
            self._refuse("EntryNotFound", HTTPStatus.NOT_FOUND)
        elif what[:1] == ["tree"]:
            self._json(
                [self._entry(file, folder, path="path") for file in files_of(folder / below)]
            )
        else:
            siblings = [self._entry(file, folder, path="rfilename") for file in files_of(folder)]
            is_private = (self.hub.folder / repo / ".unlisted").exists()
            gated = "manual" if (self.hub.folder / repo / ".gated").exists() else False
            known = {"id": repo.removeprefix("datasets/"), "sha": commit_of(folder)}
            card = self.hub.folder / repo / ".card.json"
            about = json.loads(card.read_text()) if card.exists() else {}
            self._json(
                {
                    **known,
                    "gated": gated,
                    "private": is_private,
                    "siblings": siblings,
                    "cardData": about,
                }
            )

    def _entry(self, file: Path, folder: Path, *, path: str) -> dict[str, Any]:
        digest, size = _digest(file), file.stat().st_size
        name = str(file.relative_to(folder))
        lfs = {"oid": digest, "sha256": digest, "size": size, "pointerSize": 128}
        return {path: name, "type": "file", "oid": digest, "blobId": digest, "size": size} | (
            {"lfs": lfs} if _is_large(file) else {}
        )

    # ------------------------------------------------------------------------------------- files

    def _file(self, repo: str, revision: str, name: str) -> None:
        folder = self._found(repo, revision)
        if folder is None:
            return
        if self._is_closed(repo):
            self._refuse("GatedRepo", HTTPStatus.FORBIDDEN)
            return
        file = folder / name
        if not file.is_file():
            self._refuse("EntryNotFound", HTTPStatus.NOT_FOUND)
            return
        content = file.read_bytes()
        known = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": commit_of(folder)}
        if self.command == "HEAD":
            self._answer(content, {**known, "Accept-Ranges": "bytes"})
            return
        first = int(self.headers.get("Range", "bytes=0-")[len("bytes=") :].partition("-")[0])
        self.hub.asked.append(name)
        self.hub.starts.append((name, first))
        known["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        status = HTTPStatus.PARTIAL_CONTENT if first else HTTPStatus.OK
        self._answer(content[first:], known, status, are_weights=name.endswith(".safetensors"))

    def _answer(
        self,
        content: bytes,
        headers: dict[str, str],
        status: HTTPStatus = HTTPStatus.OK,
        *,
        are_weights: bool = False,
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if not are_weights:
            self.wfile.write(content)
            return
        most = self.hub.cuts.pop(0) if self.hub.cuts else len(content)
        with suppress(ConnectionError):  # the client was killed
            for at in range(0, min(most, len(content)), PIECE):
                self.wfile.write(content[at : min(at + PIECE, most)])
                time.sleep(self.hub.piece_s)
        self.close_connection = most < len(content)

    def _json(self, value: object) -> None:
        self._answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: str, status: HTTPStatus) -> None:
        self._answer(b"", {"X-Error-Code": code} if code else {}, status)

    # ----------------------------------------------------------------------------------- uploads

    def _write(self, path: str, content: bytes) -> None:
        if path == "api/repos/create":
            asked = json.loads(content)
            self.hub.created.append(asked)
            folder = self.hub.folder / (asked.get("organization") or "own") / asked["name"]
            address = f"{self.hub.variables['HF_ENDPOINT']}/{folder.relative_to(self.hub.folder)}"
            if folder.is_dir():
                self._answer(json.dumps({"url": address}).encode(), {}, HTTPStatus.CONFLICT)
                return
            folder.mkdir(parents=True)
            if not asked.get("visibility", "").startswith("public") and asked.get("private", True):
                (folder / ".unlisted").touch()
            self._json({"url": address})
        elif path == "api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [one["path"] for one in json.loads(content)["files"]]
            every = [{"path": one, "uploadMode": "regular", "shouldIgnore": False} for one in files]
            self._json({"files": every})
        else:
            repo = path.removeprefix("api/models/").partition("/commit/")[0]
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    file = self.hub.folder / repo / line["value"]["path"]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
            address = f"{self.hub.variables['HF_ENDPOINT']}/{repo}/commit/{'0' * 40}"
            self._json({"commitUrl": address, "commitOid": "0" * 40, "success": True})


class _Server(ThreadingHTTPServer):
    """Lets as many clients wait as there may be, on a busy machine too."""

    daemon_threads = True
    request_queue_size = 128


def _revision_and_name(text: str) -> tuple[str, str]:
    """Split what follows a repository in an address."""
    parts = text.split("/")
    size = 3 if text.startswith("refs/") else 1
    return "/".join(parts[:size]), "/".join(parts[size:])


def _is_large(file: Path) -> bool:
    """Return whether a file is in large storage and not in git, as weights are by default."""
    return file.suffix == ".safetensors" and not (file.parent / ".in_git").exists()


def _digest(file: Path) -> str:
    content = file.read_bytes()
    if _is_large(file):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def ask(served: Hub, monkeypatch: pytest.MonkeyPatch, *, token: str | None = None) -> None:
    """Have this process ask a hub, with a cache of its own, which is slow to start another for."""
    from huggingface_hub import constants

    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in served.variables.items():
        monkeypatch.setenv(name, value)
    endpoint, home = served.variables["HF_ENDPOINT"], Path(served.variables["HF_HOME"])
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    look_up.cache_clear()


@contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    """Serve a folder's folders as repositories; `variables` ask it by `HF_ENDPOINT`."""
    served = Hub(folder=folder)
    handler = type("Handler", (_Handler,), {"hub": served})
    server = _Server(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    cache = folder.with_name(f"{folder.name}-cache")
    served.variables = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        **{"HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"},
    }
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
