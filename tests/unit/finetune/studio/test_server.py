"""The server: what it answers, whom it refuses, and where it listens."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from finetune import app
from finetune.errors import ConfigError
from finetune.studio.answer import Planner
from finetune.studio.server import MAX_QUESTION_BYTES, listening
from tests.studios import question_values, served, studio_of
from tests.unit.finetune.studio.runs_made import begun, write_run


@pytest.fixture(name="site")
def a_site(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    made = studio_of(tmp_path / "runs", Planner(here=None, folder=tmp_path / "configs"))
    return TestClient(made.studio.app, base_url="http://127.0.0.1:8765"), f"/{made.token}"


def test_pages_load_only_their_own_files_and_each_is_there(site) -> None:
    client, at = site
    for room in ("/", "/runs"):
        found = client.get(at + room)
        assert found.status_code == 200
        loaded = re.findall(r'(?:src|href)="([^"]+)"', found.text)
        files = [name for name in loaded if name.startswith("assets/")]
        assert files
        assert set(loaded) - set(files) <= {"data:,", "./", "runs"}
        for name in files:
            assert client.get(f"{at}/{name}").status_code == 200
    assert client.get(f"{at}/assets/LICENSE").status_code == 404
    assert client.get(f"{at}/assets/..%2fpages.py").status_code == 404


def test_every_answer_carries_the_policy_and_nothing_may_be_loaded_from_elsewhere(site) -> None:
    client, at = site
    for path in (f"{at}/", f"{at}/runs.json", f"{at}/none", "/wrong/", f"{at}/assets/plan.js"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "http" not in policy
        assert "unsafe" not in policy
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/wrong/", {}),
        ("/", {}),
        ("{at}/", {"host": "evil.example"}),
        ("{at}/", {"host": "evil.example:8765"}),
        ("{at}/runs.json", {"origin": "https://evil.example"}),
        ("{at}/assets/plan.js", {"sec-fetch-site": "cross-site"}),
    ],
)
def test_strangers_get_403_and_are_told_nothing(site, path, headers) -> None:
    client, at = site
    found = client.get(path.format(at=at), headers=headers)
    assert found.status_code == 403
    assert found.text.startswith("refused: ")
    assert at[1:] not in found.text


def test_a_question_is_answered_and_one_from_another_site_is_not(site) -> None:
    client, at = site
    body = json.dumps(question_values())
    answer = client.post(f"{at}/ask/plan", content=body)
    assert answer.json()["figures"]["predicted"]["tokens_per_s"] > 0
    assert client.post(f"{at}/ask/x", content=body).json()["error"]["what"].startswith("'x' is no")
    long = client.post(f"{at}/ask/plan", content=b" " * (MAX_QUESTION_BYTES + 1))
    assert long.status_code == 413
    stranger = {"origin": "http://evil.example"}
    assert client.post(f"{at}/ask/plan", content=body, headers=stranger).status_code == 403
    assert client.get(f"{at}/ask/plan").status_code == 405


def test_only_runs_of_the_folder_are_shown(site, tmp_path: Path) -> None:
    client, at = site
    begun(tmp_path / "secret")
    begun(tmp_path / "runs" / "own")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "runs" / "half").mkdir()
    (tmp_path / "runs" / "half" / "recipe.yaml").symlink_to(tmp_path / "secret" / "recipe.yaml")
    listed = client.get(f"{at}/runs.json").json()["runs"]
    assert [run["name"] for run in listed] == ["own"]
    for name in (
        "../secret",
        "link",
        "half",
        "own/../../secret",
        str(tmp_path / "secret"),
        "",
        ".",
    ):
        for page in ("run.json", "report"):
            found = client.get(f"{at}/{page}", params={"name": name})
            assert found.status_code == 404, name


def test_a_report_is_the_page_of_the_run_and_reaches_nothing(site, tmp_path: Path) -> None:
    client, at = site
    write_run(begun(tmp_path / "runs" / "one"), slow_s=[0.0] * 3)
    found = client.get(f"{at}/report", params={"name": "one"})
    assert found.status_code == 200
    assert "3 of 12 done" in found.text
    assert "connect-src" not in found.headers["content-security-policy"]
    assert found.headers["content-security-policy"].startswith("default-src 'none'")
    (tmp_path / "runs" / "one" / "metrics.jsonl").write_text("no json\n")
    broken = client.get(f"{at}/report", params={"name": "one"})
    assert broken.status_code == 404
    assert "metrics.jsonl" in broken.text


def test_it_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    with served(tmp_path, tmp_path / "configs") as made:
        with socket.create_connection(("127.0.0.1", made.port), timeout=5) as connection:
            assert connection.getpeername()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="refused"):  # another address of this machine
            socket.create_connection(("127.0.0.2", made.port), timeout=5)


def test_a_port_in_use_is_an_error_with_its_fix(tmp_path: Path, capsys) -> None:
    with listening(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of 127\.0\.0\.1 cannot be had"):
            listening(port)
        with pytest.raises(SystemExit) as ended:
            app.main(["studio", str(tmp_path), "--port", str(port)])
    assert ended.value.code == 1
    assert "hint: `--port 0` takes one that is free" in capsys.readouterr().err


def test_without_its_extra_the_command_says_what_to_install(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "finetune.studio.server")
    with pytest.raises(SystemExit) as ended:
        app.main(["studio", str(tmp_path)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "the page needs uvicorn, which is not installed" in said
    assert 'hint: `python -m pip install ".[studio]"`' in said
