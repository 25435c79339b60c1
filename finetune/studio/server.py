"""The server of the page: Starlette on uvicorn, on the loopback address alone."""

import socket
from collections.abc import Callable
from html import escape
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.errors import ConfigError
from finetune.report.pages.page import page
from finetune.studio import guard
from finetune.studio.answer import Planner
from finetune.studio.pages import ASSETS, asset, plan_page, runs_page
from finetune.studio.runs import Runs, report_of
from offload.errors import SluiceError

MAX_QUESTION_BYTES = 2**21
NO_FILE, TOO_LONG = 404, 413


class Studio:
    """The rooms, and the address that they are at.

    Args:
        planner: Answers questions.
        folder: Of the runs that are shown.
        token: Of the address.
        port: Where the server listens.
    """

    def __init__(self, planner: Planner, *, folder: Path, token: str, port: int) -> None:
        """Build the application; nothing listens yet."""
        self._planner, self._folder = planner, folder
        self._runs_here = Runs(folder)
        self._token, self._port = token, port
        at = f"/{token}"
        routes = [
            Route(f"{at}/", self._plan_room),
            Route(f"{at}/runs", self._runs_room),
            Route(f"{at}/assets/{{name}}", self._asset),
            Route(f"{at}/ask/{{kind}}", self._ask, methods=["POST"]),
            Route(f"{at}/runs.json", self._runs),
            Route(f"{at}/run.json", self._run),
            Route(f"{at}/report", self._report),
        ]
        self.app: ASGIApp = _Guarded(Starlette(routes=routes), token=token, port=port)

    @property
    def address(self) -> str:
        """What to open."""
        return f"http://{guard.HOST}:{self._port}/{self._token}/"

    async def _plan_room(self, _: Request) -> Response:
        return HTMLResponse(plan_page(is_static=False))

    async def _runs_room(self, _: Request) -> Response:
        return HTMLResponse(runs_page())

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return PlainTextResponse("no such file", NO_FILE)
        kinds = {"js": "text/javascript", "css": "text/css"}
        return Response(asset(name), media_type=kinds[name.rpartition(".")[2]])

    async def _ask(self, request: Request) -> Response:
        kind, body = request.path_params["kind"], await request.body()
        if len(body) > MAX_QUESTION_BYTES:
            return PlainTextResponse("too long a question", TOO_LONG)
        asked = body.decode("utf-8", "replace")
        text = await run_in_threadpool(self._planner.answered, kind, asked)
        return Response(text, media_type="application/json")

    async def _runs(self, _: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self._runs_here.all))

    async def _run(self, request: Request) -> Response:
        name = request.query_params.get("name", "")
        try:
            return JSONResponse(await run_in_threadpool(self._runs_here.one, name))
        except SluiceError as error:
            return JSONResponse({"problem": str(error)}, NO_FILE)

    async def _report(self, request: Request) -> Response:
        name = request.query_params.get("name", "")
        headers = {"Content-Security-Policy": guard.REPORT_POLICY}
        try:
            text = await run_in_threadpool(report_of, self._folder, name)
        except SluiceError as error:
            said = page("No report", f"<pre>{escape(str(error))}</pre>")
            return HTMLResponse(said, NO_FILE, headers=headers)
        return HTMLResponse(text, headers=headers)


class _Guarded:
    """Refuses what the guard refuses, and puts its headers on every answer."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app, self._token, self._port = app, token, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = message["headers"]
                assert isinstance(given, list)
                names = {name.lower() for name, _ in given}
                given += [
                    (name.lower().encode(), value.encode())
                    for name, value in guard.HEADERS.items()
                    if name.lower().encode() not in names
                ]
            await send(message)

        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        why = guard.refusal(headers, scope["path"], token=self._token, port=self._port)
        answer = self._app if why is None else PlainTextResponse(f"refused: {why}\n", 403)
        await answer(scope, receive, send_guarded)


def listening(port: int) -> socket.socket:
    """Return a socket on the loopback address.

    Args:
        port: 0 takes any that is free.

    Raises:
        ConfigError: The port is in use, or may not be had.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((guard.HOST, port))
        found.listen()
    except OSError as error:
        found.close()
        raise ConfigError(
            f"port {port} of {guard.HOST} cannot be had: {error.strerror}",
            limit="one program listens on a port",
            hint="`--port 0` takes one that is free, or end the program that has it",
        ) from error
    return found


def serve(planner: Planner, *, folder: Path, port: int, announce: Callable[[str], None]) -> None:
    """Serve both rooms until Ctrl-C.

    Args:
        planner: Answers questions.
        folder: Of the runs that are shown.
        port: Where to listen; 0 takes any that is free.
        announce: Gets the address, once it can be opened.

    Raises:
        ConfigError: The port is in use.
    """
    with listening(port) as found:
        own = found.getsockname()[1]
        studio = Studio(planner, folder=folder, token=guard.new_token(), port=own)
        announce(studio.address)
        config = uvicorn.Config(studio.app, log_level="error", access_log=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[found])
