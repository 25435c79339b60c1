"""The server of the page: Starlette on uvicorn, on the loopback address alone."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from html import escape
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn
from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.errors import StudioError
from finetune.loopback import HOST, listening
from finetune.processes import prepare_worker, process_context, signals_deferred
from finetune.recipe.extensions import Section
from finetune.report.charts import page
from finetune.studio import guard
from finetune.studio.answer import Json, Kind, Planner, Question
from finetune.studio.launcher import Launcher
from finetune.studio.rows import rows_page
from finetune.studio.runs import (
    ASSETS,
    Runs,
    asset,
    plan_page,
    report_of,
    require_run,
    runs_page,
)
from finetune.studio.talk import MAX_IMAGE_BYTES, Talk
from offload.errors import SluiceError
from offload.plan.machine.machine import Machine

# ---------------------------------------------------------------------------------------------
# Answers what the page asks while its controls rest, in a second process.
#
# A point of the break-even curve takes as long as a plan, and one process computes one at a time,
# so a plan that is asked for meanwhile would wait. The second process yields to it: its priority is
# lower. It measures nothing: a question about this machine comes with the machine.

NICENESS = 10  # of 19; the process that serves has 0


class Background:
    """The second process, from entering this context to leaving it.

    Args:
        folder: Where pasted configs are written.
        root: A folder that models may be in.
    """

    def __init__(self, folder: Path, *, root: Path) -> None:
        """Start nothing yet."""
        self._folders = folder, root
        self._is_asked = threading.Lock()

    def __enter__(self) -> Self:
        """Start the process; it imports the planner while the command goes on."""
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill the process: it only computes, so nothing is lost."""
        self._end()

    def answer(self, kind: Kind, question: Question, here: Machine | None) -> Json:
        """Return the answer of the second process.

        Args:
            kind: Of the question.
            question: What is asked.
            here: This machine, if the question is about it.

        Raises:
            StudioError: The process has died, of this question or before; a new one has started.
        """
        with self._is_asked:
            try:
                self._pipe.send((kind, question, here))
                answer: Json = self._pipe.recv()
            except (EOFError, ConnectionError) as error:
                code = self._end()
                self._start()
                raise StudioError(
                    f"the process that answers {kind!r} in the background died (exit code {code})",
                    limit="it needs memory of its own to plan",
                    hint="change a control to ask again: a new process has started",
                ) from error
            return answer

    def _start(self) -> None:
        context = process_context()
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=_answer_all, args=(its_end, *self._folders))
        with signals_deferred():
            self._process.start()
        its_end.close()

    def _end(self) -> int | None:
        """Return the exit code."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        return self._process.exitcode


def _answer_all(
    pipe: "Connection[Json, tuple[Kind, Question, Machine | None]]", folder: Path, root: Path
) -> None:
    prepare_worker()
    os.nice(NICENESS)
    found: Machine | None = None

    def here() -> Machine:
        assert found is not None, "a question about this machine comes with it"
        return found

    planner = Planner(here=here, folder=folder, root=root)
    with suppress(EOFError, ConnectionError):  # the command has ended
        while True:
            kind, question, found = pipe.recv()
            pipe.send(planner.answer(kind, question))


MAX_QUESTION_BYTES = 2**21
MAX_MESSAGE_BYTES = MAX_QUESTION_BYTES + 4 * MAX_IMAGE_BYTES // 3  # an image is sent in base64
NO_FILE, REFUSED, TOO_LONG = 404, 409, 413


class Start(Section):
    """A run that is to be started."""

    recipe: str = Field(max_length=4096, description="A recipe, relative to the studio's folder.")
    name: str = Field(max_length=100, description="Of the run.")


class Said(Section):
    """What is said to a finished run."""

    name: str = Field(max_length=4096, description="Of the run.")
    said: str = Field(min_length=1, max_length=2**16, description="A message.")
    image: str | None = Field(
        default=None, description="An image that the message is about, as a `data:` URI."
    )


class Named(Section):
    """A run that is to be stopped or resumed."""

    name: str = Field(max_length=4096, description="Of the run.")


class Studio:
    """The rooms, and the address that they are at.

    Args:
        planner: Answers questions.
        launcher: Starts, stops and resumes runs.
        folder: The folder of the runs that are shown.
        token: The token of the address.
        port: Where the server listens.
    """

    def __init__(
        self, planner: Planner, launcher: Launcher, *, folder: Path, token: str, port: int
    ) -> None:
        """Build the application; nothing listens yet."""
        self._planner, self._launcher, self._folder = planner, launcher, folder
        self._runs_here = Runs(folder)
        self.talk = Talk(folder)
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
            Route(f"{at}/rows", self._rows),
            Route(f"{at}/recipes.json", self._recipes),
            Route(f"{at}/start", self._start, methods=["POST"]),
            Route(f"{at}/start-plan", self._start_plan, methods=["POST"]),
            Route(f"{at}/resume", self._resume, methods=["POST"]),
            Route(f"{at}/stop", self._stop, methods=["POST"]),
            Route(f"{at}/chat", self._chat, methods=["POST"]),
        ]
        self.app: ASGIApp = _Guarded(Starlette(routes=routes), token=token, port=port)

    @property
    def address(self) -> str:
        """What to open."""
        return f"http://{HOST}:{self._port}/{self._token}/"

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
        return await _page(request, lambda name: report_of(self._folder, name))

    async def _rows(self, request: Request) -> Response:
        def rows(name: str) -> str:
            run = self._folder.resolve() / require_run(self._folder, name)
            return rows_page(run, root=self._launcher.root)

        return await _page(request, rows)

    async def _recipes(self, _: Request) -> Response:
        return JSONResponse({"recipes": await run_in_threadpool(self._launcher.recipes)})

    async def _start(self, request: Request) -> Response:
        def start(body: bytes) -> None:
            asked = Start.model_validate_json(body)
            self.talk.end()
            self._launcher.start(asked.recipe, asked.name)

        return await _done(request, start)

    async def _start_plan(self, request: Request) -> Response:
        def start(body: bytes) -> None:
            asked = Question.model_validate_json(body)
            text = self._planner.startable(asked)
            self._launcher.require_rows(asked.run.rows)
            self.talk.end()
            self._launcher.start_text(text, asked.run.name)

        return await _done(request, start)

    async def _resume(self, request: Request) -> Response:
        def resume(body: bytes) -> None:
            asked = Named.model_validate_json(body)
            self.talk.end()
            self._launcher.resume(require_run(self._folder, asked.name))

        return await _done(request, resume)

    async def _stop(self, request: Request) -> Response:
        def stop(body: bytes) -> None:
            asked = Named.model_validate_json(body)
            self._launcher.stop(require_run(self._folder, asked.name))

        return await _done(request, stop)

    async def _chat(self, request: Request) -> Response:
        def answer(body: bytes) -> Response:
            asked = Said.model_validate_json(body)
            name = require_run(self._folder, asked.name)
            parts = self.talk.answer(name, asked.said, asked.image)
            return StreamingResponse(
                (json.dumps(part) + "\n" for part in parts), media_type="application/x-ndjson"
            )

        return await _done(request, answer, most_bytes=MAX_MESSAGE_BYTES)


async def _page(request: Request, made: Callable[[str], str]) -> Response:
    """Return a page of a run, which is one file with its own scripts; or why there is none."""
    headers = {"Content-Security-Policy": guard.REPORT_POLICY}
    try:
        text = await run_in_threadpool(made, request.query_params.get("name", ""))
    except SluiceError as error:
        said = page("No page of this run", f"<pre>{escape(str(error))}</pre>")
        return HTMLResponse(said, NO_FILE, headers=headers)
    return HTMLResponse(text, headers=headers)


async def _done(
    request: Request,
    do: Callable[[bytes], Response | None],
    *,
    most_bytes: int = MAX_QUESTION_BYTES,
) -> Response:
    """Do what a body asks, or say why not."""
    body = await request.body()
    if len(body) > most_bytes:
        problem = f"{len(body):,} bytes are sent, and at most {most_bytes:,} are read"
        return JSONResponse({"problem": problem}, TOO_LONG)
    try:
        answer = await run_in_threadpool(do, body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        return JSONResponse({"problem": f"{where}: {first['msg']}"}, REFUSED)
    except SluiceError as error:
        return JSONResponse({"problem": str(error)}, REFUSED)
    return answer or JSONResponse({"problem": None})


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


def serve(
    planner: Planner,
    launcher: Launcher,
    *,
    folder: Path,
    port: int,
    announce: Callable[[str], None],
) -> None:
    """Serve both rooms until Ctrl-C; runs that were started go on.

    Args:
        planner: Answers questions.
        launcher: Starts, stops and resumes runs.
        folder: Of the runs that are shown.
        port: Where to listen; 0 takes any that is free.
        announce: Gets the address, once it can be opened.

    Raises:
        ConfigError: The port is in use.
    """
    with listening(port) as found:
        own = found.getsockname()[1]
        studio = Studio(planner, launcher, folder=folder, token=guard.new_token(), port=own)
        announce(studio.address)
        config = uvicorn.Config(studio.app, log_level="error", access_log=False, lifespan="off")
        try:
            uvicorn.Server(config).run(sockets=[found])
        finally:
            studio.talk.close()
