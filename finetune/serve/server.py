"""The server: Tinker's routes on Starlette and uvicorn, on the loopback address alone.

Every process of this machine and every web page in its browsers can reach the loopback address. So
a request has to carry the key, its Host has to be the loopback one (DNS rebinding), and no web page
may have sent it. Bodies are counted while they come; what is too long is not read to its end.
"""

import asyncio
import json
import re
import resource
import secrets
import signal
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from pydantic import BaseModel, StrictInt
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from tinker import types

from finetune.errors import CheckpointError, ConfigError, DataError
from finetune.files.atomic import write_atomically
from finetune.loopback import HOST, listening
from finetune.serve import wire
from finetune.serve.checkpoints import FILES, Kind, Record, expiry
from finetune.serve.limits import BusyError, GoneError
from finetune.serve.sessions import Sessions
from finetune.serve.status import STATUS_FILE
from offload.errors import SluiceError

API, KEY_FILE = "/api/v1", "key"
KEY_PREFIX, KEY_BYTES = "tml-", 24
MAX_BODY_BYTES, MAX_CONNECTIONS = 2**25, 2**16
_JSON_BYTES, _JSON_TOKEN_BYTES = 2**17, 16  # of a request in JSON, and of each token of its prompt
_URL_S = 3600.0  # how long a file of a checkpoint can be downloaded at its address
_SHOWN_S = 2.0
_PAGE = 100
REFUSED, UNKNOWN, GONE, TOO_LONG, BUSY, PENDING = 400, 404, 410, 413, 429, 408


class TooLongError(DataError):
    """More was sent than is read."""


class _TinkerPath(BaseModel):
    tinker_path: str


class _Ttl(BaseModel):
    ttl_seconds: StrictInt | None


_STATUSES: Mapping[type[SluiceError], int] = {
    TooLongError: TOO_LONG,
    GoneError: GONE,
    BusyError: BUSY,
    CheckpointError: UNKNOWN,
}
_TYPES: Mapping[Kind, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
Answer = Awaitable[Response]


def key_in(folder: Path) -> str:
    """Return the key that clients need, of a file that its owner alone can read; a new one first.

    Raises:
        ConfigError: Others can read the file, or it holds no key.
    """
    file = folder / KEY_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
        write_atomically(file, key + "\n", mode=0o600)
        return key
    key, mode = file.read_text().strip(), stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077 or not key.startswith(KEY_PREFIX) or len(key) < len(KEY_PREFIX) + KEY_BYTES:
        raise ConfigError(
            f"{file} has the mode {mode:o}" if mode & 0o077 else f"{file} holds no key",
            limit=f"it is readable by its owner alone, and begins with {KEY_PREFIX}",
            hint=f"`rm {file}`: a new key is made",
        )
    return key


class Server:
    """The routes, for one base."""

    def __init__(self, sessions: Sessions, *, key: str, port: int) -> None:
        """Build the application; nothing listens yet."""
        self._sessions, self._port = sessions, port
        self._urls: dict[str, tuple[str, str, float]] = {}
        post, get = partial(self._route, method="POST"), partial(self._route, method="GET")
        promised, run = self._promised, "training_runs/{run}"
        checkpoint = f"{run}/checkpoints/{{kind}}/{{name}}"
        routes = [
            get("healthz", self._health),
            get("get_server_capabilities", self._capabilities),
            post("client/config", self._config),
            post("telemetry", self._telemetry),
            post("create_session", self._create_session),
            post("session_heartbeat", self._heartbeat),
            post("sessions/{id}/finish", self._finish),
            get("sessions", self._list_sessions),
            get("sessions/{id}", self._session),
            post("create_model", promised(types.CreateModelRequest, sessions.create_model)),
            post("get_info", self._info),
            post("forward_backward", self._train),
            post("optim_step", promised(types.OptimStepRequest, sessions.step)),
            post("save_weights", promised(types.SaveWeightsRequest, sessions.save)),
            post(
                "save_weights_for_sampler",
                promised(types.SaveWeightsForSamplerRequest, sessions.save_for_sampler),
            ),
            post(
                "save_weights_external",
                promised(types.SaveWeightsExternalRequest, sessions.save_external),
            ),
            post("load_weights", promised(types.LoadWeightsRequest, sessions.load_weights)),
            post("create_sampling_session", self._create_sampler),
            get("samplers/{id}", self._sampler),
            post("asample", self._sample),
            post("retrieve_future", self._retrieve),
            post("weights_info", self._weights_info),
            get("training_runs", self._runs),
            get(run, self._run),
            get(f"{run}/checkpoints", self._of_run),
            get("checkpoints", self._checkpoints),
            get(f"{checkpoint}/external_weights_urls", self._download_urls),
            self._route(f"{checkpoint}/ttl", self._expire, method="PUT"),
            self._route(checkpoint, self._delete, method="DELETE"),
            get("/download/{url}", self._download),
        ]
        self.app: ASGIApp = _Guarded(Starlette(routes=routes), key=key, port=port)

    def _route(self, path: str, answer: Callable[[Request], Answer], *, method: str) -> Route:
        async def answered(request: Request) -> Response:
            try:
                return await answer(request)
            except SluiceError as error:
                status = next(
                    (n for kind, n in _STATUSES.items() if isinstance(error, kind)), REFUSED
                )
                return JSONResponse({"detail": str(error)}, status)

        return Route(path if path[0] == "/" else f"{API}/{path}", answered, methods=[method])

    async def _parsed(self, request: Request, kind: type[wire.Asked]) -> wire.Asked:
        """Return a request in JSON; a wrong one takes many times its length in errors."""
        most = _JSON_BYTES + _JSON_TOKEN_BYTES * self._sessions.limits.row_tokens
        hint = "prompts are tokens of text; `sluice serve --row-tokens` has room for longer ones"
        return wire.parsed(await _body(request, most=most, hint=hint), kind)

    # ----------------------------------------------------------------------------- the service

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, _: Request) -> Response:
        model = {
            "model_name": self._sessions.base.name,
            "max_context_length": self._sessions.limits.row_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    async def _config(self, _: Request) -> Response:
        limits = self._sessions.limits
        return JSONResponse(
            {
                "fwdbwd_max_chunk_len": limits.chunk_rows,
                "sample_max_concurrent_requests": limits.num_pending,
            }
        )

    async def _telemetry(self, request: Request) -> Response:
        await _body(request)  # it is dropped: it may hold what the user's program was doing
        return JSONResponse({"status": "accepted"})

    async def _create_session(self, request: Request) -> Response:
        asked = await self._parsed(request, types.CreateSessionRequest)
        return JSONResponse({"type": "create_session", **self._sessions.create_session(asked)})

    async def _heartbeat(self, request: Request) -> Response:
        asked = await self._parsed(request, types.SessionHeartbeatRequest)
        self._sessions.hear(asked.session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        await _body(request)
        await self._sessions.finish(request.path_params["id"])
        return Response(status_code=204)

    async def _list_sessions(self, request: Request) -> Response:
        return JSONResponse({"sessions": _page(request, list(self._sessions.sessions))[0]})

    async def _session(self, request: Request) -> Response:
        models, samplers, notes = self._sessions.of_session(request.path_params["id"])
        said = {key: str(value) for key, value in notes.items()}
        found = {"training_run_ids": models, "sampler_ids": samplers, "user_metadata": said}
        return JSONResponse(found)

    # ---------------------------------------------------------------------- training, sampling

    def _promised(
        self, kind: type[wire.Asked], promise: Callable[[wire.Asked], str]
    ) -> Callable[[Request], Answer]:
        """Return what answers requests of a kind with the names of the answers to come."""

        async def promised(request: Request) -> Response:
            return JSONResponse({"request_id": promise(await self._parsed(request, kind))})

        return promised

    async def _info(self, request: Request) -> Response:
        model = self._sessions.model((await self._parsed(request, types.GetInfoRequest)).model_id)
        base = self._sessions.base
        data = {"arch": base.architecture, "model_name": base.name, "tokenizer_id": base.name}
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_data": data,
                "model_name": base.name,
                "is_lora": True,
                "lora_rank": model.settings.rank,
            }
        )

    async def _train(self, request: Request) -> Response:
        if not request.headers.get("content-type", "").startswith(wire.PROTOBUF):
            raise DataError("a request to train that is no protobuf", hint="use a newer tinker")
        asked = wire.training_request(await _body(request))
        return JSONResponse({"request_id": self._sessions.train(asked)})

    async def _create_sampler(self, request: Request) -> Response:
        asked = await self._parsed(request, types.CreateSamplingSessionRequest)
        sampler_id = self._sessions.create_sampler(asked)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _sampler(self, request: Request) -> Response:
        sampler = self._sessions.sampler(request.path_params["id"])
        return JSONResponse(
            {
                "sampler_id": sampler.id,
                "base_model": self._sessions.base.name,
                "model_path": sampler.path,
            }
        )

    async def _sample(self, request: Request) -> Response:
        name, sequences = self._sessions.sample(await self._parsed(request, types.SampleRequest))
        return JSONResponse({"request_id": name, "sample_sequence_ids": sequences})

    async def _retrieve(self, request: Request) -> Response:
        name = (await self._parsed(request, types.FutureRetrieveRequest)).request_id
        promise = self._sessions.promises.find(name)
        reply = await self._sessions.promises.wait(promise)
        if reply is not None:
            kind = wire.PROTOBUF if reply.is_protobuf else "application/json"
            return Response(reply.content, media_type=kind)
        pending = {"type": "try_again", "request_id": name, "queue_state": "active"}
        if promise.is_waiting:
            most = self._sessions.limits.num_clients
            pending |= {
                "queue_state": "paused_capacity",
                "queue_state_reason": f"all {most} slots are taken: `sluice serve --clients`",
            }
        return JSONResponse(pending, PENDING)

    # ----------------------------------------------------------------------------- checkpoints

    async def _weights_info(self, request: Request) -> Response:
        asked = await self._parsed(request, _TinkerPath)
        record = self._sessions.checkpoints.find(asked.tinker_path)
        base = self._sessions.base
        parts = {base.linears.get(name, "head") for name in record.targets}
        return JSONResponse(
            {
                "base_model": record.base,
                "is_lora": True,
                "lora_rank": record.rank,
                "train_unembed": "head" in parts,
                "train_mlp": bool(parts & {"mlp", "shared_experts"}),
                "train_attn": "attention" in parts,
            }
        )

    async def _runs(self, request: Request) -> Response:
        by_run = _by_run(self._sessions.checkpoints)
        names, cursor = _page(request, list(by_run))
        runs = [_run_json(by_run[name]) for name in names]
        return JSONResponse({"training_runs": runs, "cursor": cursor})

    async def _run(self, request: Request) -> Response:
        return JSONResponse(_run_json(self._records(request)))

    async def _of_run(self, request: Request) -> Response:
        found = [_checkpoint_json(one) for one in self._records(request)]
        return JSONResponse({"checkpoints": found})

    def _records(self, request: Request) -> list[Record]:
        run = request.path_params["run"]
        found = _by_run(self._sessions.checkpoints).get(run)
        if found is None:
            raise CheckpointError(
                f"there is no checkpoint of {run[:120]!r}", hint="`tinker checkpoint list`"
            )
        return found

    async def _checkpoints(self, request: Request) -> Response:
        found, cursor = _page(request, list(self._sessions.checkpoints))
        shown = [_checkpoint_json(one) for one in found]
        return JSONResponse({"checkpoints": shown, "cursor": cursor})

    def _path(self, request: Request) -> str:
        given = request.path_params
        path = f"tinker://{given['run']}/{given['kind']}/{given['name']}"
        self._sessions.checkpoints.find(path)
        return path

    async def _delete(self, request: Request) -> Response:
        await asyncio.to_thread(self._sessions.checkpoints.remove, self._path(request))
        return Response(status_code=204)

    async def _expire(self, request: Request) -> Response:
        path, asked = self._path(request), await self._parsed(request, _Ttl)
        now_s = time.time()  # noqa: TID251 - a date
        ends_s = expiry(now_s, asked.ttl_seconds)
        await asyncio.to_thread(self._sessions.checkpoints.expire, path, ends_s)
        return JSONResponse({})

    async def _download_urls(self, request: Request) -> Response:
        path, ends_s = self._path(request), time.time() + _URL_S  # noqa: TID251 - a date
        self._urls = {url: one for url, one in self._urls.items() if one[2] > ends_s - _URL_S}
        found = {}
        for file in FILES:
            url = secrets.token_urlsafe(KEY_BYTES)
            self._urls[url] = path, file, ends_s
            found[file] = f"http://{HOST}:{self._port}/download/{url}"
        return JSONResponse({"urls": found, "expires": _date(ends_s)})

    async def _download(self, request: Request) -> Response:
        path, file, ends_s = self._urls.get(request.path_params["url"], ("", "", 0.0))
        if ends_s < time.time():  # noqa: TID251 - a date
            return JSONResponse({"detail": "there is no such file, or its address is old"}, UNKNOWN)
        return FileResponse(self._sessions.checkpoints.file(path, file))


async def _body(
    request: Request, *, most: int = MAX_BODY_BYTES, hint: str = "send it in parts"
) -> bytes:
    """Return a body.

    Raises:
        TooLongError: It has more bytes than that.
    """
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > most:
            raise TooLongError(f"a request of more than {most:,} bytes", hint=hint)
    return bytes(found)


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the items that are asked for, the newest first, and where they are among all."""
    given = parse_qs(request.url.query)
    numbers = {}
    for name, usual in (("limit", _PAGE), ("offset", 0)):
        text = given.get(name, [str(usual)])[0]
        if not re.fullmatch("[0-9]{1,9}", text):
            raise ConfigError(f"{name} is {text[:20]!r}", hint="a number")
        numbers[name] = int(text)
    limit, offset = min(numbers["limit"], 1000), numbers["offset"]
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[::-1][offset : offset + limit], cursor


def _by_run(records: Any) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.run, []).append(record)
    return found


def _run_json(records: list[Record]) -> dict[str, Any]:
    last = records[-1]
    newest = {one.kind: _checkpoint_json(one) for one in records}
    return {
        "training_run_id": last.run,
        "base_model": last.base,
        "model_owner": "you",
        "is_lora": True,
        "lora_rank": last.rank,
        "last_request_time": _date(last.time_s),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": last.notes,
    }


def _checkpoint_json(record: Record) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{record.kind}/{record.name}",
        "checkpoint_type": _TYPES[record.kind],
        "time": _date(record.time_s),
        "tinker_path": record.path,
        "size_bytes": record.num_bytes,
        "user_metadata": record.notes,
        "expires_at": None if record.expires_s is None else _date(record.expires_s),
    }


def _date(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat()


class _Guarded:
    """Refuses who has no key, and what a web page or another name of this machine asks."""

    def __init__(self, app: ASGIApp, *, key: str, port: int) -> None:
        self._app, self._key = app, key.encode()
        self._hosts = {f"{HOST}:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        why = self._refusal(headers, scope["path"])
        answer = self._app if why is None else JSONResponse({"detail": why[1]}, why[0])
        await answer(scope, receive, send)

    def _refusal(self, headers: Mapping[bytes, bytes], path: str) -> tuple[int, str] | None:
        if headers.get(b"host", b"").decode("latin-1") not in self._hosts:
            return 403, "the Host header is not this machine's"
        if b"origin" in headers or b"sec-fetch-site" in headers:
            return 403, "a web page asks"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return TOO_LONG, f"a request has up to {MAX_BODY_BYTES:,} bytes"
        is_right = secrets.compare_digest(headers.get(b"x-api-key", b""), self._key)
        if not is_right and not path.startswith("/download/"):
            return 401, "the key is wrong: `export TINKER_API_KEY=$(cat ...)`, as the server said"
        return None


class _Server(uvicorn.Server):
    """A server that a signal ends, after which models are saved."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the event loop."""
        yield

    def end(self, sessions: Sessions) -> None:
        """End serving."""
        self.should_exit = True
        sessions.promises.release()


def serve(
    sessions: Sessions,
    *,
    key: str,
    port: int,
    folder: Path,
    announce: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C; then all models are saved.

    Args:
        sessions: Sessions of all clients.
        key: Key of all clients.
        port: Port to listen at; 0 takes any that is free.
        folder: Folder that `STATUS_FILE` is written to, for the runs room.
        announce: Gets the address, once clients may come.

    Raises:
        ConfigError: The port is in use.
        Exception: The engine has failed, by what it has raised.
    """
    scheduler, failures = sessions.base.scheduler, list[Exception]()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # a client has one for each answer
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, MAX_CONNECTIONS), most))
    with listening(port) as found:
        own = found.getsockname()[1]
        app = Server(sessions, key=key, port=own).app
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,  # clients that wait for answers ask again
        )
        server = _Server(config)

        def compute() -> None:
            try:
                scheduler.serve()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
                server.should_exit = True

        async def run() -> None:
            tasks = [
                asyncio.create_task(sessions.watch()),
                asyncio.create_task(_show(sessions, folder / STATUS_FILE)),
            ]
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, server.end, sessions)
            announce(f"http://{HOST}:{own}")
            await server.serve(sockets=[found])
            for task in tasks:
                task.cancel()
            if not failures:
                await sessions.close()

        engine = threading.Thread(target=compute, name="engine", daemon=True)
        engine.start()
        try:
            asyncio.run(run())
        finally:
            scheduler.close()
            engine.join()
            (folder / STATUS_FILE).unlink(missing_ok=True)
    if failures:
        raise failures[0]


async def _show(sessions: Sessions, file: Path) -> None:
    """Write what the clients do, where the runs room reads it; by its date it knows of a kill."""
    while True:
        status = json.dumps(sessions.status(), indent=1) + "\n"
        with suppress(OSError):  # the disk is full: what saves says so
            await asyncio.to_thread(write_atomically, file, status)
        await asyncio.sleep(_SHOWN_S)
