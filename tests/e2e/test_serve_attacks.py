"""A server in a process of its own, against bodies of a gigabyte, floods, kills and a full disk."""

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.serve.checkpoints import Checkpoints
from finetune.serve.server import key_in
from tests.served_here import training
from tests.serving import NAME, Served, save_base, served

pytestmark = pytest.mark.slow
GIB, MIB = 2**30, 2**20
CLIENT = """
import sys, tinker
from tests.serving import NAME, row
client = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
model = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
print(model.model_id, flush=True)
while True:
    model.forward_backward([row([3, 4, 5], [4, 5, 6], weights=[1, 1, 1])], "cross_entropy").result()
    model.optim_step(tinker.AdamParams()).result()
    print("step", flush=True)
"""


@pytest.fixture(scope="module", name="server")
def a_server(tmp_path_factory: pytest.TempPathFactory, machine_file: Path) -> Iterator[Served]:
    base, folder = save_base(tmp_path_factory.mktemp("base")), tmp_path_factory.mktemp("served")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))  # as of a shell, or less
    with served(base, folder, machine_file, "--clients", "2") as found:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        yield found


@pytest.fixture(scope="module", name="killed")
def a_client_that_is_killed(server: Served) -> str:
    """Return the model of a client that has died while it trained."""
    command = [sys.executable, "-c", CLIENT, server.address, server.key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        model = client.stdout.readline().strip()
        assert client.stdout.readline().strip() == "step"
        client.kill()
    return model


@pytest.fixture(name="goes_on", autouse=True)
def the_server_goes_on(server: Served, killed: str) -> Iterator[None]:
    yield
    assert server.process.poll() is None
    assert ask(server, "GET", "healthz")[0] == 200
    assert killed


def connected(server: Served) -> http.client.HTTPConnection:
    host, port = server.address.removeprefix("http://").split(":")
    return http.client.HTTPConnection(host, int(port), timeout=60)


def ask(server: Served, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """Return the status of an answer, and the answer."""
    connection = connected(server)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"x-api-key": server.key, **{k.replace("_", "-"): v for k, v in headers.items()}}
    connection.request(method, f"/api/v1/{path}", None if body is None else content, given)
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    is_json = answer.headers["content-type"] == "application/json"
    return answer.status, json.loads(found) if is_json and found else found


def wait(server: Served, promised: str) -> Any:
    while True:
        code, found = ask(server, "POST", "retrieve_future", {"request_id": promised})
        if code != 408:
            assert code == 200, found
            return found


def begun(server: Served) -> str:
    said = {"tags": [], "user_metadata": {"note": "mine"}, "sdk_version": "0.38.0"}
    return str(ask(server, "POST", "create_session", said)[1]["session_id"])


def model_of(server: Served, session: str) -> str:
    said = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": NAME,
        "lora_config": {"rank": 4},
    }
    return str(wait(server, ask(server, "POST", "create_model", said)[1]["request_id"])["model_id"])


def train(server: Served, model: str, number: int) -> Any:
    body = training(model, number).SerializeToString()
    return ask(server, "POST", "forward_backward", body, content_type="application/x-protobuf")


def finish(server: Served, session: str) -> None:
    assert ask(server, "POST", f"sessions/{session}/finish", {})[0] == 204


def peak_bytes(server: Served) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


# ---------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("what", ["forward_backward", "asample", "telemetry"])
def test_a_body_of_a_gigabyte_takes_no_memory(
    server: Served, what: str, has_length: bool, has_key: bool
) -> None:
    before = peak_bytes(server)
    connection = connected(server)
    connection.putrequest("POST", f"/api/v1/{what}")
    connection.putheader("x-api-key", server.key if has_key else "tml-wrong")
    connection.putheader("content-type", "application/x-protobuf")
    if has_length:
        connection.putheader("content-length", str(GIB))
    else:
        connection.putheader("transfer-encoding", "chunked")
    connection.endheaders()
    part = b" " * MIB
    sent = f"{len(part):x}\r\n".encode() + part + b"\r\n"
    try:
        for _ in range(1024):
            connection.send(part if has_length else sent)
        if not has_length:
            connection.send(b"0\r\n\r\n")
    except (BrokenPipeError, ConnectionResetError):
        pass  # it was refused before its end
    else:
        code = connection.getresponse().status
        assert code == (413 if has_key or has_length else 401)
    finally:
        connection.close()
    assert peak_bytes(server) - before < 160 * MIB


def test_bytes_that_are_no_http_are_refused(server: Served) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    for said in (
        b"\0" * 1000,
        b"GET / HTTP/1.1\r\nHost: \r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /api/v1/asample HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 9\r\n\r\n",
        b"POST /api/v1/asample HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=20) as opened:
            opened.sendall(said)
            opened.shutdown(socket.SHUT_WR)
            found = b""
            try:
                while part := opened.recv(65536):
                    found += part
            except ConnectionResetError:
                continue
            assert not found or found.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), found[:200]


def test_other_names_of_this_machine_are_refused(server: Served) -> None:
    for host in ("evil.example", "127.0.0.1", "0.0.0.0:80"):
        connection = connected(server)
        connection.putrequest("GET", "/api/v1/healthz", skip_host=True)
        connection.putheader("Host", host)
        connection.putheader("x-api-key", server.key)
        connection.endheaders()
        assert connection.getresponse().status == 403
        connection.close()


# ---------------------------------------------------------------------------------------- floods


def test_many_polls_at_once_are_held_and_others_are_answered(server: Served) -> None:
    """As the SDK holds a connection for each answer that it waits for."""
    session = begun(server)
    said = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = ask(server, "POST", "create_sampling_session", said)[1]["sampling_session_id"]
    params = {"max_tokens": 60, "temperature": 1.0}
    chunk = {"type": "encoded_text", "tokens": [3, 4, 5]}
    given = {"prompt": {"chunks": [chunk]}, "sampling_params": params}
    promised = []
    for number in range(100):
        asked = {**given, "sampling_session_id": sampler, "seq_id": number}
        code, found = ask(server, "POST", "asample", asked)
        assert code == 200
        promised.append(found["request_id"])
    codes: list[int] = []

    def poll(name: str) -> None:
        codes.append(ask(server, "POST", "retrieve_future", {"request_id": name})[0])

    polls = [threading.Thread(target=poll, args=(name,)) for name in promised for _ in range(3)]
    for one in polls:
        one.start()
    begun_s = time.monotonic()
    assert ask(server, "GET", "healthz")[0] == 200
    assert time.monotonic() - begun_s < 10
    finish(server, session)
    for one in polls:
        one.join()
    assert set(codes) <= {200, 408, 410}


def test_connections_that_say_nothing_do_not_keep_others_out(server: Served) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    opened = [socket.create_connection((host, int(port))) for _ in range(500)]
    try:
        for one in opened[:100]:
            one.sendall(b"POST /api/v1/asample HTTP/1.1\r\nContent-Length: 100\r\n")
        assert ask(server, "GET", "healthz")[0] == 200
    finally:
        for one in opened:
            one.close()


# ------------------------------------------------------------------------------- disk, secrets


def test_a_folder_has_one_server(server: Served, machine_file: Path) -> None:
    with (
        pytest.raises(AssertionError, match=f"process {server.process.pid}"),
        served(server.base, server.folder, machine_file),
    ):
        pass
    assert key_in(server.folder) == server.key


def test_a_full_disk_fails_the_request_by_name(server: Served) -> None:
    session = begun(server)
    model = model_of(server, session)
    assert train(server, model, 1)[0] == 200
    pid, whole = server.process.pid, resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (8000, whole[1]))
    said = {"model_id": model, "seq_id": 2, "path": "a"}
    found = wait(server, ask(server, "POST", "save_weights", said)[1]["request_id"])
    assert found["category"] == "user"
    assert "cannot be written" in found["error"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, whole)
    said |= {"seq_id": 3}
    found = wait(server, ask(server, "POST", "save_weights", said)[1]["request_id"])
    assert found["path"] == f"tinker://{model}/weights/a"
    finish(server, session)


def test_the_state_on_disk_holds_no_secret(server: Served) -> None:
    session = begun(server)
    model = model_of(server, session)
    file, ends_s = server.folder / "clients.json", time.monotonic() + 20
    while time.monotonic() < ends_s:
        if file.exists() and model in file.read_text():
            break
        time.sleep(0.2)
    said = file.read_text()
    assert model in said
    assert server.key not in said
    assert server.key[4:] not in said
    assert "mine" not in said
    for one in server.folder.rglob("*"):
        assert one.name == "key" or not one.is_file() or server.key.encode() not in one.read_bytes()
    assert (server.folder / "key").stat().st_mode & 0o777 == 0o600
    finish(server, session)


# ----------------------------------------------------------------------------------------- kills


def test_a_client_that_was_killed_is_saved_and_gives_way(server: Served, killed: str) -> None:
    first, second = begun(server), begun(server)
    model_of(server, first)
    is_done = threading.Event()

    def beat() -> None:
        while not is_done.wait(5):
            for one in (first, second):
                ask(server, "POST", "session_heartbeat", {"session_id": one})

    beats = threading.Thread(target=beat)
    beats.start()
    model = model_of(server, second)  # waits until the other has been silent for long enough
    is_done.set()
    beats.join()
    assert train(server, model, 1)[0] == 200
    saved = [one["tinker_path"] for one in ask(server, "GET", "checkpoints")[1]["checkpoints"]]
    assert f"tinker://{killed}/weights/left" in saved
    assert train(server, killed, 1000)[0] == 410
    for session in (first, second):
        finish(server, session)


def test_ctrl_c_saves_clients_whose_work_is_in_flight(
    server: Served, tmp_path: Path, machine_file: Path
) -> None:
    with served(server.base, tmp_path, machine_file) as own:
        session = begun(own)
        model = model_of(own, session)
        assert train(own, model, 1)[0] == 200
        step = {"model_id": model, "seq_id": 2, "adam_params": {}}
        wait(own, ask(own, "POST", "optim_step", step)[1]["request_id"])
        for number in range(3, 300):
            assert train(own, model, number)[0] == 200
        codes: list[Any] = []

        def poll() -> None:
            try:
                codes.append(ask(own, "POST", "retrieve_future", {"request_id": f"{model}:299"})[0])
            except OSError as error:
                codes.append(error)

        held = threading.Thread(target=poll)
        held.start()
        os.kill(own.process.pid, signal.SIGINT)
        assert own.process.stderr is not None
        said = own.process.stderr.read()
        assert own.process.wait(30) == 0, said
        held.join()
    assert "ERROR" not in said
    assert codes == [408]
    assert f"tinker://{model}/weights/left" in said
    assert not (tmp_path / "clients.json").exists()
    saved = Checkpoints(tmp_path / "checkpoints")
    assert [(one.path, one.num_steps) for one in saved] == [(f"tinker://{model}/weights/left", 1)]
    assert saved.load(f"tinker://{model}/weights/left", has_moments=True).moments["state"]
