"""Questions of the studio's page, a studio that is served, a browser for it, and axe-core."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from finetune.loopback import listening
from finetune.serve.status import STATUS_FILE
from finetune.studio.answer import Planner, Question
from finetune.studio.guard import new_token
from finetune.studio.launcher import Launcher
from finetune.studio.server import Background, Studio
from offload.plan.machine.machine import Machine

SETUP: dict[str, Any] = {
    "model": "qwen3-0.6b",
    "card": "rtx3060",
    "num_cards": 1,
    "method": "lora",
    "rank": 16,
    "codec": "auto",
    "objective": "sft",
    "seq_len": 2048,
    "tokens_per_step": 8192,
    "micro_batch_size": 1,
}
WORK = {
    "data_tokens": 36_000_000,
    "price_per_hour": 0.5,
    "power_watts": 400,
    "price_per_kwh": 0.25,
}
CHROMIUM = Path("/usr/bin/chromium")
CHROMIUM_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def question_values(*, zoom: int = 1, **changes: Any) -> dict[str, Any]:
    return {"setup": SETUP | changes, "work": WORK, "zoom": zoom}


def question(**changes: Any) -> Question:
    return Question.model_validate(question_values(**changes))


@dataclass(frozen=True, kw_only=True)
class Served:
    studio: Studio
    port: int
    token: str


def studio_of(
    folder: Path,
    planner: Planner,
    *,
    port: int = 8765,
    root: Path | None = None,
    machine_file: Path | None = None,
) -> Served:
    """Return a studio that nothing serves yet; without a root it starts nothing."""
    token = new_token()
    launcher = Launcher(folder, root=root or folder, machine_file=machine_file)
    studio = Studio(planner, launcher, folder=folder, token=token, port=port)
    return Served(studio=studio, port=port, token=token)


@contextmanager
def served(
    folder: Path, configs: Path, root: Path | None = None, machine_file: Path | None = None
) -> Iterator[Served]:
    """Serve a studio in a thread."""
    at = root or folder
    with listening(0) as sockets, Background(configs, root=at) as background:
        text = None if machine_file is None else machine_file.read_text()
        here = None if text is None else partial(Machine.from_json, text)
        planner = Planner(here=here, folder=configs, root=at, background=background.answer)
        port = sockets.getsockname()[1]
        made = studio_of(folder, planner, port=port, root=root, machine_file=machine_file)
        config = uvicorn.Config(made.studio.app, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sockets]})
        thread.start()
        try:
            yield made
        finally:
            server.should_exit = True
            thread.join()
            made.studio.talk.close()


@contextmanager
def browser() -> Iterator[Any]:
    """Start Debian's chromium, or skip the test."""
    if not CHROMIUM.exists():
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        yield found
        found.close()


def axe_script() -> str:
    """Return axe-core, which checks whether a page is accessible, or skip the test."""
    package = util.find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        pytest.skip("axe-playwright-python is not installed")
    return (Path(package.origin).parent / "axe.min.js").read_text("utf-8")


def serious_findings(page: Any, axe: str) -> list[str]:
    """Return what axe-core finds serious or critical in a page, with all of it unfolded."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.evaluate(axe)
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    assert found["passes"], "nothing was checked"
    return [
        f"{one['id']}: {one['help']} ({node['html'][:160]})"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def client_status(name: str, **changes: Any) -> dict[str, Any]:
    """Return what a server says of a client."""
    return {
        "id": name,
        "rank": 32,
        "num_steps": 1200,
        "num_tokens": 98304,
        "last_loss": 2.5,
        "num_sampled": 5000,
        "num_pending": 2,
        "silent_s": 4.2,
    } | changes


def write_status(folder: Path, *clients: dict[str, Any], num_waiting: int = 0) -> Path:
    """Write what a server says of its clients, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "base": "Qwen/Qwen3-8B",
        "clients": clients,
        "num_waiting": num_waiting,
        "num_passes": {"train": 8, "score": 0, "decode": 400},
        "num_loads": {"train": 288, "score": 0, "decode": 13400},
    }
    (folder / STATUS_FILE).write_text(json.dumps(found))
    return folder / STATUS_FILE
