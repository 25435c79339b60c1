"""What a server answers to those who should not ask, and to what no client sends."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

from finetune.errors import ConfigError
from finetune.serve.base import Base
from finetune.serve.server import MAX_BODY_BYTES, key_in
from tests.served_here import (
    KEY,
    PORT,
    ROW_TOKENS,
    Here,
    datum,
    opened_here,
    served_here,
    tensor,
    training,
)

PASSWD = "../../../../etc/passwd"


@pytest.fixture(scope="module", name="base")
def a_base() -> Iterator[Base]:
    with opened_here() as found:
        yield found


@pytest.fixture(scope="module", name="here")
def a_server(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    with served_here(base, tmp_path_factory.mktemp("saved")) as found:
        yield found
        session = found.begin()
        assert isinstance(found.wait(found.sample(found.sampler(session), 1)), bytes)
        model = found.model(session)
        found.scored(found.train(model))


@pytest.fixture(scope="module", name="model")
def a_model(here: Here) -> str:
    return here.model()


@pytest.fixture(scope="module", name="path")
def a_checkpoint(here: Here, model: str) -> str:
    return str(here.wait(here.of_model("save_weights", model, path="first"))["path"])


@pytest.fixture(name="goes_on", autouse=True)
def the_server_goes_on(here: Here, model: str) -> Iterator[None]:
    """After each attack, answers come as before."""
    yield
    assert here.post("get_info", model_id=model).json()["lora_rank"] == 4


# --------------------------------------------------------------------------------- who may ask


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"x-api-key": ""}, 401),
        ({"x-api-key": KEY[:-1]}, 401),
        ({"x-api-key": KEY + "k"}, 401),
        ({"x-api-key": KEY.upper()}, 401),
        ({"x-api-key": "\xff"}, 401),
        ({"authorization": f"Bearer {KEY}", "x-api-key": "tml-"}, 401),
        ({"host": "evil.example"}, 403),
        ({"host": f"evil.example:{PORT}"}, 403),
        ({"host": "127.0.0.1"}, 403),
        ({"host": f"127.0.0.1:{PORT}.evil.example"}, 403),
        ({"host": "0.0.0.0"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": f"http://127.0.0.1:{PORT}"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 403),
        ({"sec-fetch-site": "none"}, 403),
    ],
)
def test_others_are_refused(here: Here, changed: dict[str, str], code: int) -> None:
    headers = {name: value.encode("latin-1") for name, value in changed.items()}
    for path in ("/api/v1/healthz", "/api/v1/checkpoints", "/nothing"):
        found = here.http.get(path, headers=headers)  # type: ignore[arg-type]
        assert found.status_code == code
        assert KEY not in found.text
        assert "access-control" not in str(found.headers).lower()


def test_without_a_key_nothing_is_shown(here: Here) -> None:
    key = here.http.headers.pop("x-api-key")
    try:
        for path in ("/api/v1/healthz", "/api/v1/sessions", "/", "/docs", "/openapi.json"):
            assert here.http.get(path).status_code == 401
        assert here.http.get("/download/x").status_code == 404
        assert here.http.get("/download/../api/v1/checkpoints").status_code == 401
    finally:
        here.http.headers["x-api-key"] = key


def test_no_other_origin_is_let_in(here: Here) -> None:
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    found = here.http.options("/api/v1/create_session", headers=headers)
    assert found.status_code == 403


def test_a_key_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    key = key_in(tmp_path)
    file = tmp_path / "key"
    assert file.stat().st_mode & 0o777 == 0o600
    assert key.startswith("tml-")
    assert len(key) > 32
    assert key_in(tmp_path) == key
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=f"mode 644.*\n*.*rm {file}"):
        key_in(tmp_path)
    file.chmod(0o600)
    for content in ("", "tml-short", "secret" * 10):
        file.write_text(content)
        with pytest.raises(ConfigError, match="holds no key"):
            key_in(tmp_path)


def test_what_is_shown_of_clients_holds_no_secrets(here: Here, model: str) -> None:
    here.scored(here.train(model))
    sampler = here.sampler(model.split(":")[0], 99)
    here.wait(here.sample(sampler, 1))
    shown = json.dumps(here.sessions.status())
    assert model in shown
    assert KEY not in shown
    assert "user_metadata" not in shown


# ---------------------------------------------------------------------------------------- paths


BAD_NAMES = ["../x", "a/b", "a\0b", 65 * "n", "", " ", "a b", "\u00e9", "a\n", "/etc/passwd", "~"]


@pytest.mark.parametrize("what", ["save_weights", "save_weights_for_sampler"])
@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_no_names_are_refused(
    here: Here, model: str, what: str, name: str, tmp_path: Path
) -> None:
    assert "letters, digits" in here.failed(here.of_model(what, model, path=name))


@pytest.mark.parametrize("name", [".", "..", "...", "-rf", ".hidden", 64 * "n"])
def test_odd_names_stay_in_their_folder(here: Here, model: str, name: str) -> None:
    """No file is named by a client: a name is a word in an index."""
    path = here.wait(here.of_model("save_weights", model, path=name))["path"]
    assert path == f"tinker://{model}/weights/{name}"
    folder = here.sessions.checkpoints._folder
    assert all(len(one.name) == 16 for one in folder.iterdir())
    assert not (folder.parent / name).is_file()
    here.sessions.checkpoints.remove(path)


@pytest.mark.parametrize(
    "path",
    [
        f"tinker://{PASSWD}",
        "tinker://a/weights/../../x",
        "file:///etc/passwd",
        "/etc/passwd",
        "",
        "tinker://",
        "tinker://\0/weights/a",
        "tinker://" + 10_000 * "a",
    ],
)
def test_paths_of_nothing_are_not_found(here: Here, model: str, path: str) -> None:
    session = model.split(":")[0]
    asked: list[Any] = [
        here.post("weights_info", tinker_path=path),
        here.post("load_weights", path=path, session_id=session, model_seq_id=77, optimizer=True),
        here.post(
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=78,
            model_path=path,
        ),
    ]
    for one in asked:
        assert one.status_code == 404
        assert "root:" not in one.text
        assert len(one.text) < 1000
    assert here.wait(here.of_model("load_weights", model, path=path, optimizer=True))["error"]


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("..%2f..%2fetc", "passwd"),
        ("%2e%2e", "first"),
        ("%00", "%2e%2e"),
        ("a%2fb", "..%2fkey"),
        (PASSWD, "first"),
        ("%ff", "%ff"),
        (5000 * "a", "first"),
    ],
)
def test_tricks_in_addresses_find_nothing(here: Here, path: str, run: str, name: str) -> None:
    for kind in ("weights", "%2e%2e"):
        checkpoint = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
        found = [
            here.http.get(f"/api/v1/training_runs/{run}"),
            here.http.get(f"/api/v1/training_runs/{run}/checkpoints"),
            here.http.get(f"{checkpoint}/external_weights_urls"),
            here.http.put(f"{checkpoint}/ttl", json={"ttl_seconds": 5}),
            here.http.delete(checkpoint),
        ]
        for one in found:
            assert one.status_code in (404, 405), one.text
            assert len(one.text) < 1000
    assert here.post("weights_info", tinker_path=path).status_code == 200


@pytest.mark.parametrize(
    "name", ["", "x", "..%2fkey", "%2e%2e/key", "../key", PASSWD, "%00", 9000 * "a"]
)
def test_addresses_that_were_not_given_download_nothing(here: Here, name: str) -> None:
    found = here.http.get(f"/download/{name}")
    assert found.status_code in (404, 307)
    assert "tml-" not in found.text


def test_a_given_address_downloads_one_file_until_it_is_gone(here: Here, model: str) -> None:
    path = here.wait(here.of_model("save_weights", model, path="shown"))["path"]
    run = quote(model, safe="")
    at = f"/api/v1/training_runs/{run}/checkpoints/weights/shown"
    urls = here.http.get(f"{at}/external_weights_urls").json()["urls"]
    key = here.http.headers.pop("x-api-key")
    try:
        assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
        for url in urls.values():
            assert here.http.get(url).status_code == 200
            assert here.http.get(f"{url}x").status_code == 404
            assert here.http.get(f"{url}%2f..").status_code == 404
            refused = here.http.get(url, headers={"sec-fetch-site": "cross-site"})
            assert refused.status_code == 403
        here.sessions.checkpoints.remove(path)
        for url in urls.values():
            assert here.http.get(url).status_code == 404
    finally:
        here.http.headers["x-api-key"] = key


@pytest.mark.parametrize("ttl", [0, -5, 10**10, 10**30, 10**400, 1.5, "a", True, [1], {}])
def test_times_that_a_date_cannot_hold_are_refused(
    here: Here, model: str, path: str, ttl: Any
) -> None:
    run = quote(model, safe="")
    at = f"/api/v1/training_runs/{run}/checkpoints/weights/first/ttl"
    found = here.http.put(at, content=json.dumps({"ttl_seconds": ttl}))
    assert found.status_code == 400, found.text
    assert here.http.get("/api/v1/checkpoints").status_code == 200
    if type(ttl) is int and ttl < 10**300:
        asked = here.of_model("save_weights", model, path="kept", ttl_seconds=ttl)
        assert "ttl_seconds" in here.failed(asked)
    assert path in here.http.get("/api/v1/checkpoints").text


@pytest.mark.parametrize(
    "query",
    ["limit=-1", "limit=a", "limit=\u00b2", "offset=\u0661x", "limit=" + 5000 * "9", "offset=1e3"],
)
def test_pages_that_are_no_pages_are_refused(here: Here, path: str, query: str) -> None:
    for what in ("checkpoints", "training_runs", "sessions"):
        assert here.http.get(f"/api/v1/{what}?{query}").status_code == 400


def test_a_page_beyond_the_end_is_empty(here: Here, path: str) -> None:
    found = here.http.get("/api/v1/checkpoints?limit=5&offset=999999999").json()
    assert found["checkpoints"] == []
    assert path in here.http.get("/api/v1/checkpoints?limit=999999999").text


# --------------------------------------------------------------------------------------- bodies


POSTS = [
    *("create_session", "session_heartbeat", "create_model", "get_info", "optim_step"),
    *("save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights"),
    *("create_sampling_session", "asample", "retrieve_future", "weights_info"),
]
BAD_JSON = [
    *(b"", b"{", b"[]", b"null", b"1", b'"a"', b"{}", b"\xff\xfe", b"\0", b'{"a": 1}'),
    *(b"[" * 60_000, b'{"a":' * 20_000, b"NaN", b'{"model_id": {}, "seq_id": []}'),
    b'{"type": "x", "session_id": null}',
]


@pytest.mark.parametrize("what", POSTS)
def test_bodies_that_are_no_requests_are_refused(here: Here, what: str) -> None:
    for body in BAD_JSON:
        found = here.http.post(f"/api/v1/{what}", content=body)
        assert found.status_code == 400, (body[:20], found.text)
        assert len(found.text) < 2000


@pytest.mark.parametrize("what", ["asample", "telemetry", "forward_backward"])
def test_bodies_without_end_are_not_read(here: Here, what: str) -> None:
    """One of a gigabyte that does not say how long it is: its first parts are read and dropped."""
    part, num_read, codes = b" " * 2**20, 0, []

    async def receive() -> dict[str, Any]:
        nonlocal num_read
        num_read += len(part)
        return {"type": "http.request", "body": part, "more_body": num_read < 2**30}

    async def send(message: dict[str, Any]) -> None:
        codes.append(message.get("status"))

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/api/v1/{what}",
        "query_string": b"",
        "headers": [
            (b"host", f"127.0.0.1:{PORT}".encode()),
            (b"x-api-key", KEY.encode()),
            (b"content-type", b"application/x-protobuf"),
        ],
    }
    here.run(here.http.app, scope, receive, send)
    assert codes[0] == 413
    assert num_read <= MAX_BODY_BYTES + len(part)


@pytest.mark.parametrize("length", [str(2**30), str(MAX_BODY_BYTES + 1), "-1", "1e3", "\xb2"])
def test_bodies_that_say_they_are_long_are_not_read(here: Here, length: str) -> None:
    headers = {"content-length": length.encode("latin-1")}
    found = here.http.post("/api/v1/telemetry", content=b"", headers=headers)  # type: ignore[arg-type]
    assert found.status_code == 413


def test_a_long_wrong_prompt_takes_little_memory(here: Here) -> None:
    """A list of wrong tokens gives an error for each of them."""
    body = b'{"prompt": {"chunks": [{"type": "encoded_text", "tokens": [%s]}]}}'
    tracemalloc.start()
    long, longer = (body % b",".join([b'"a"'] * num) for num in (30_000, 2_000_000))
    assert here.http.post("/api/v1/asample", content=long).status_code == 400
    assert here.http.post("/api/v1/asample", content=longer).status_code == 413
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2**28


def test_json_is_no_request_to_train(here: Here, model: str) -> None:
    found = here.post("forward_backward", model_id=model, seq_id=1)
    assert found.status_code == 400
    assert "newer tinker" in found.text


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x1a\x05abc", b"{}"])
def test_bytes_that_are_no_protobuf_are_refused(here: Here, body: bytes) -> None:
    found = here.send(body)
    assert found.status_code in (400, 410), found.text


@pytest.mark.parametrize("what", ["zstd", "gzip"])
def test_compressed_bodies_are_not_unpacked(here: Here, what: str) -> None:
    headers = {"content-encoding": what, "content-type": "application/x-protobuf"}
    found = here.http.post("/api/v1/forward_backward", content=b"\x1f\x8b\x08", headers=headers)
    assert found.status_code == 400


# ----------------------------------------------------------------------------------------- rows


def row(**changes: Any) -> pb.Datum:
    """Return a row of four tokens with something wrong in it."""
    found = datum([3, 4, 5, 6])
    for name, value in changes.items():
        if name == "tokens":
            found.model_input[0].encoded_text.tokens = value
        else:
            found.loss_fn_inputs[name].CopyFrom(value)
    return found


def ints(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def image() -> pb.Datum:
    found = datum([3, 4, 5, 6])
    found.model_input.add().image.SetInParent()
    return found


def unset() -> pb.Datum:
    found = datum([3, 4, 5, 6])
    found.model_input.add()
    return found


def shaped(*shape: int, dense: bytes = b"", dtype: int = 1) -> pb.Tensor:
    return pb.Tensor(dense=dense, dtype=dtype, shape=shape)  # type: ignore[arg-type]


def sparse() -> pb.Tensor:
    found = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[4, 2])
    found.sparse_csr.SetInParent()
    return found


LONG = [3] * (ROW_TOKENS + 1)
TOP_K = np.zeros(8, np.int64).tobytes()
BAD_ROWS: dict[str, tuple[pb.Datum, str]] = {
    "bytes": (row(tokens=ints(3, 4, 5, 6)[:-1]), "row 0"),
    "none": (datum([]), "0 tokens"),
    "negative": (row(tokens=ints(3, -1, 5, 6)), "-1"),
    "unknown token": (row(tokens=ints(3, 4, 5, 10**6)), "1000000"),
    "unknown target": (datum([3, 4], [3, 10**6]), "1000000"),
    "huge target": (datum([3, 4], [3, 2**62]), str(2**62)),
    "negative target": (datum([3, 4], [3, -1]), "no tokens"),
    "ignored target": (datum([3, 4], [3, -100]), "no tokens"),
    "target of no int": (row(target_tokens=tensor([3, 4, 5, 6])), "no tokens"),
    "long": (datum(LONG), f"1 to {ROW_TOKENS}"),
    "few targets": (datum([3, 4, 5], [3, 4]), "2 numbers for 3 tokens"),
    "few weights": (datum([3, 4], weights=[1.0]), "1 numbers for 2 tokens"),
    "nan": (datum([3, 4], weights=[1.0, float("nan")]), "no numbers"),
    "infinite": (datum([3, 4], weights=[1.0, float("inf")]), "no numbers"),
    "top k": (row(target_tokens=shaped(4, 2, dense=TOP_K, dtype=2)), r"shape [4, 2]"),
    "sparse": (row(target_tokens=sparse()), "sparse"),
    "shape": (row(weights=shaped(2**40, dense=b"")), "shape"),
    "negative shape": (row(weights=shaped(-4, dense=b"")), "shape"),
    "type": (row(weights=shaped(4, dense=16 * b"\0", dtype=0)), "type"),
    "other type": (row(weights=shaped(4, dense=16 * b"\0", dtype=99)), "type"),
    "odd bytes": (row(weights=shaped(4, dense=15 * b"\0")), "multiple"),
    "more inputs": (row(advantages=tensor([1.0] * 4)), "advantages"),
    "no weights": (datum([3, 4], advantages=[1.0, 1.0]), "weights"),
    "nothing": (pb.Datum(), "0 tokens"),
    "image": (image(), "kind image"),
    "no kind": (unset(), "kind None"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("forward_only", [False, True])
def test_wrong_rows_are_refused_by_name(
    here: Here, model: str, name: str, forward_only: bool
) -> None:
    bad, why = BAD_ROWS[name]
    asked = here.train(model, data=[datum([3, 4]), bad], forward_only=forward_only)
    found = here.failed(asked)
    assert why.replace("row 0", "row 1") in found
    if not forward_only:
        assert "before this step" in here.failed(here.step(model))


def test_requests_without_rows_and_with_too_many_are_refused(here: Here, model: str) -> None:
    assert "without rows" in here.failed(here.train(model, data=[]))
    many = [datum([3])] * 1025
    assert "1025 rows" in here.failed(here.train(model, data=many))
    here.failed(here.step(model))


def test_fields_that_are_not_known_are_refused(here: Here, model: str) -> None:
    """Those of a newer client may say what is to be computed."""
    body = training(model, here.number(model)).SerializeToString()
    found = here.send(body + b"\xa2\x06\x01x")  # the field 100
    assert "the fields 100" in here.failed(found)
    assert "before this step" in here.failed(here.step(model))


# ------------------------------------------------------------------------------------- sampling


BAD_PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"ids": []}, "without tokens"),
    ({"ids": [-1]}, "-1"),
    ({"ids": [10**6]}, "1000000"),
    ({"ids": [2**62]}, str(2**62)),
    ({"ids": [3] * (ROW_TOKENS + 1)}, "a shorter prompt"),
    ({"num_samples": 0}, "num_samples"),
    ({"num_samples": -3}, "num_samples"),
    ({"num_samples": 10**9}, "num_samples"),
    ({"num_samples": 2**70}, "num_samples"),
    ({"params": {"max_tokens": 0}}, "max_tokens"),
    ({"params": {"max_tokens": -1}}, "max_tokens"),
    ({"params": {"max_tokens": 10**9}}, "max_tokens"),
    ({"params": {"temperature": -1.0}}, "temperature"),
    ({"params": {"temperature": "NaN"}}, "temperature"),
    ({"params": {"temperature": "Infinity"}}, "temperature"),
    ({"params": {"top_k": 5}}, "top_k"),
    ({"params": {"top_p": 0.5}}, "top_p"),
    ({"params": {"stop": [""]}}, "stop"),
    ({"prompt": {"chunks": [{"type": "image", "data": "aaaa", "format": "png"}]}}, "image"),
    ({"topk_prompt_logprobs": 3}, "topk_prompt_logprobs"),
    ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
    ({"model_path": "tinker://a/weights/b"}, "model_path"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "last_n"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": -4}, "last_n"),
]


@pytest.mark.parametrize(("said", "why"), BAD_PROMPTS)
def test_wrong_prompts_are_refused_by_name(here: Here, said: dict[str, Any], why: str) -> None:
    session = here.begin()
    asked = here.sample(here.sampler(session), 1, **dict(said))
    text = asked.text if asked.status_code == 400 else here.failed(asked)
    assert why in text
    assert len(text) < 2000
    here.http.post(f"/api/v1/sessions/{session}/finish")


@pytest.mark.parametrize(
    "said",
    [
        {"params": {"seed": -1}},
        {"params": {"seed": 2**70}},
        {"params": {"temperature": 1e-30}},
        {"params": {"temperature": 1e30}},
        {"params": {"stop": [10**9, -5]}},
        {"params": {"stop": "a"}},
        {"params": {"stop": []}},
        {"prompt_logprobs": True, "ids": [3]},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 100},
    ],
)
def test_odd_prompts_are_answered(here: Here, said: dict[str, Any]) -> None:
    session = here.begin()
    found = here.wait(here.sample(here.sampler(session), 1, **dict(said)))
    assert isinstance(found, bytes), found
    here.http.post(f"/api/v1/sessions/{session}/finish")


# --------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ({"rank": 0}, "rank 0"),
        ({"rank": -1}, "rank -1"),
        ({"rank": 9}, "--rank 9"),
        ({"rank": 10**9}, "rank"),
        ({"train_mlp": False, "train_attn": False, "train_unembed": False}, "on nothing"),
        ({"seed": 2**70}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_models_that_were_not_planned_are_refused(
    here: Here, lora: dict[str, Any], why: str
) -> None:
    session = here.begin()
    asked = here.post(
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model="tiny/qwen3",
        lora_config={"rank": 4, **lora},
    )
    assert asked.status_code == 400, asked.text
    assert why in asked.text
    here.http.post(f"/api/v1/sessions/{session}/finish")


@pytest.mark.parametrize("name", ["other/model", "", "../tiny", 5000 * "m"])
def test_other_bases_are_refused(here: Here, name: str) -> None:
    asked = here.post("create_model", session_id=here.begin(), model_seq_id=0, base_model=name)
    assert asked.status_code == 400
    assert "tiny/qwen3" in asked.text
    assert len(asked.text) < 1000


@pytest.mark.parametrize("name", ["", "x", "../..", 5000 * "s", "\0"])
def test_sessions_and_models_that_are_not_there_are_gone(here: Here, name: str) -> None:
    asked = [
        here.post("session_heartbeat", session_id=name),
        here.post("create_model", session_id=name, model_seq_id=0, base_model="tiny/qwen3"),
        here.post("get_info", model_id=name),
        here.post("optim_step", model_id=name, seq_id=1, adam_params={}),
        here.sample(name, 1),
        here.train(name),
    ]
    for one in asked:
        assert one.status_code == 410
        assert len(one.text) < 1000
