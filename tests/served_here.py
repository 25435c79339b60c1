"""A server of a tiny model in this process, whose engine can be held, and a client of its wire."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient
from tinker.proto import tinker_public_pb2 as pb

from finetune.clients.scheduler import Scheduler
from finetune.serve.base import Base
from finetune.serve.checkpoints import Checkpoints
from finetune.serve.limits import Limits
from finetune.serve.server import Server
from finetune.serve.sessions import Sessions
from finetune.serve.wire import PROTOBUF
from tests.doubles import tiny_tokenizer
from tests.parity.clients import base_model, shared_engine

NAME, KEY, PORT = "tiny/qwen3", "tml-" + 32 * "k", 8765
PARTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attention"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
NUM_CLIENTS, NUM_SAMPLERS, ROW_TOKENS = 2, 2, 64
_WAIT_S = 30.0


@contextmanager
def opened_here() -> Iterator[Base]:
    """Attach a tiny model; nothing computes yet."""
    model = base_model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    engine = shared_engine(model, num_slots=2)
    try:
        scheduler = Scheduler(
            engine,
            pattern="pattern",
            max_clients=NUM_CLIENTS + NUM_SAMPLERS,
            max_rank=8,
            max_cached_tokens=512,
        )
        yield Base(
            names=(NAME,),
            scheduler=scheduler,
            linears=PARTS,
            head="lm_head",
            tokenizer=tiny_tokenizer(),
            eos_ids=frozenset({1}),
            architecture="qwen3",
        )
    finally:
        engine.detach()


class Gate:
    """Lets the engine compute, unless it is shut."""

    def __init__(self) -> None:
        self.open, self._is_shut = threading.Lock(), False

    def clear(self) -> None:
        """Shut it, after the pass that runs."""
        self.open.acquire()
        self._is_shut = True

    def set(self) -> None:
        if self._is_shut:
            self._is_shut = False
            self.open.release()


@dataclass(kw_only=True)
class Here:
    """A server, and a client that speaks to it without an SDK."""

    sessions: Sessions
    http: TestClient
    notes: list[str]
    gate: Gate
    numbers: dict[str, int] = field(default_factory=dict)  # of each model's last request

    def post(self, path: str, /, **said: Any) -> Any:
        return self.http.post(f"/api/v1/{path}", json=said)

    def begin(self) -> str:
        said: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        return str(self.post("create_session", **said).json()["session_id"])

    def create(self, session: str, number: int = 0, **lora: Any) -> Any:
        """Ask for a model; return its name and that of the answer."""
        config = {"rank": 4, "seed": 1, **lora}
        asked = self.post(
            "create_model",
            session_id=session,
            model_seq_id=number,
            base_model=NAME,
            lora_config=config,
        )
        assert asked.status_code == 200, asked.text
        return f"{session}:train:{number}", asked.json()["request_id"]

    def model(self, session: str | None = None, number: int = 0, **lora: Any) -> str:
        """Begin a model."""
        model, promised = self.create(self.begin() if session is None else session, number, **lora)
        assert self.wait(promised)["model_id"] == model
        return str(model)

    def number(self, model: str) -> int:
        self.numbers[model] = self.numbers.get(model, 0) + 1
        return self.numbers[model]

    def send(self, request: pb.ForwardBackwardRequest | bytes) -> Any:
        body = request if isinstance(request, bytes) else request.SerializeToString()
        return self.http.post(
            "/api/v1/forward_backward", content=body, headers={"content-type": PROTOBUF}
        )

    def train(self, model: str, **changes: Any) -> Any:
        number = changes.pop("seq_id", None) or self.number(model)
        return self.send(training(model, number, **changes))

    def step(self, model: str, **params: Any) -> Any:
        number = params.pop("seq_id", None) or self.number(model)
        return self.post("optim_step", model_id=model, seq_id=number, adam_params=params)

    def of_model(self, what: str, model: str, /, **said: Any) -> Any:
        return self.post(what, model_id=model, seq_id=self.number(model), **said)

    def sampler(self, session: str, number: int = 0, **said: Any) -> str:
        asked = self.post(
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=number,
            **(said or {"base_model": NAME}),
        )
        assert asked.status_code == 200, asked.text
        return str(asked.json()["sampling_session_id"])

    def sample(self, sampler: str, number: int, ids: Sequence[int] = (3, 4, 5), **said: Any) -> Any:
        params = {"max_tokens": 3, "temperature": 1.0, **said.pop("params", {})}
        chunk = {"type": "encoded_text", "tokens": list(ids)}
        asked = {
            "prompt": {"chunks": [chunk]},
            "sampling_params": params,
            "sampling_session_id": sampler,
            "seq_id": number,
            "num_samples": 1,
            **said,
        }
        return self.post("asample", **asked)

    def poll(self, promised: str) -> Any:
        return self.http.post("/api/v1/retrieve_future", json={"request_id": promised})

    def wait(self, promised: Any) -> Any:
        """Return an answer: JSON, or the bytes of a protobuf."""
        if not isinstance(promised, str):
            assert promised.status_code == 200, promised.text
            promised = promised.json()["request_id"]
        ends_s = time.monotonic() + _WAIT_S
        while time.monotonic() < ends_s:
            answer = self.poll(promised)
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                is_json = answer.headers["content-type"] == "application/json"
                return answer.json() if is_json else answer.content
        raise AssertionError(f"no answer to {promised}")

    def scored(self, promised: Any) -> pb.ForwardBackwardOutput:
        found = self.wait(promised)
        assert isinstance(found, bytes), found
        return pb.ForwardBackwardOutput.FromString(found)

    def failed(self, promised: Any) -> str:
        """Return why a request has failed."""
        found = self.wait(promised)
        assert isinstance(found, dict)
        assert found.get("category") == "user", found
        return str(found["error"])

    def run(self, work: Any, *given: Any) -> Any:
        """Do something in the server's event loop."""
        assert self.http.portal is not None
        return self.http.portal.call(work, *given)

    def until(self, is_so: Any) -> None:
        ends_s = time.monotonic() + _WAIT_S
        while not is_so():
            assert time.monotonic() < ends_s
            time.sleep(0.01)


@contextmanager
def served_here(base: Base, folder: Path, **limits: Any) -> Iterator[Here]:
    """Serve a base in this context to clients of one event loop."""
    notes: list[str] = []
    given = {
        "num_clients": NUM_CLIENTS,
        "num_samplers": NUM_SAMPLERS,
        "max_rank": 8,
        "row_tokens": ROW_TOKENS,
        "pass_tokens": 2 * ROW_TOKENS,
        "hold_s": 0.2,
    }
    sessions = Sessions(
        base, Checkpoints(folder), Limits(**given | limits), note=lambda text: notes.append(text)
    )
    gate, is_ended = Gate(), threading.Event()

    def compute() -> None:
        while not is_ended.is_set():
            with gate.open:
                is_any = base.scheduler.run_pass()
            time.sleep(0.0 if is_any else 0.002)

    engine = threading.Thread(target=compute)
    engine.start()
    client = TestClient(
        Server(sessions, key=KEY, port=PORT).app,
        base_url=f"http://127.0.0.1:{PORT}",
        headers={"x-api-key": KEY},
    )
    try:
        with client:
            here = Here(sessions=sessions, http=client, notes=notes, gate=gate)
            try:
                yield here
            finally:
                gate.set()
                here.run(sessions.close)
    finally:
        is_ended.set()
        engine.join()
    assert not base.scheduler.adapters.names, "a slot is taken by nobody"
    assert (sessions._slots.num_taken, sessions._samplers.slots.num_taken) == (0, 0)
    assert sessions.promises._waiting_bytes == 0
    assert not list(sessions.promises)


def tensor(values: Sequence[float], *, is_int: bool = False) -> pb.Tensor:
    data = np.array(values, np.int64 if is_int else np.float32).tobytes()
    return pb.Tensor(dense=data, dtype=pb.DTYPE_INT64 if is_int else pb.DTYPE_FLOAT32)


def datum(
    ids: Sequence[int], targets: Sequence[int] | None = None, **inputs: Sequence[float]
) -> pb.Datum:
    row = pb.Datum()
    row.model_input.add().encoded_text.tokens = np.array(ids, np.int32).tobytes()
    row.loss_fn_inputs["target_tokens"].CopyFrom(
        tensor(ids if targets is None else targets, is_int=True)
    )
    for name, values in (inputs or {"weights": [1.0] * len(ids)}).items():
        row.loss_fn_inputs[name].CopyFrom(tensor(values))
    return row


def training(
    model: str,
    number: int,
    data: Sequence[pb.Datum] | None = None,
    *,
    loss: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    forward_only: bool = False,
) -> pb.ForwardBackwardRequest:
    return pb.ForwardBackwardRequest(
        model_id=model,
        seq_id=number,
        data=[datum([3, 4, 5, 6])] if data is None else data,
        loss_fn=loss,
        loss_fn_config=config or {},
        forward_only=forward_only,
    )
