"""Learning from answers that a server samples: one of ours, which replies in vLLM's shapes."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.online.outside import Server, ServerError, require_server
from tests.e2e.conftest import RecipeWriter
from tests.e2e.rounds import MOST, NUM_ANSWERS, online, open_round, round_of
from tests.e2e.runs import adapter, rows_of, run

BASE = "base"
FIXED = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
    "return_token_ids": True,
}
Change = Callable[[dict[str, Any]], None]


class FakeVllm(ThreadingHTTPServer):
    """Samples from a plain model of transformers, with adapters that peft loads."""

    daemon_threads = True

    def __init__(self, model_dir: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model_dir = model_dir
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.models: dict[str, Any] = {BASE: self.plain()}
        self.asked: list[dict[str, Any]] = []  # completions of adapters
        self.loads: list[dict[str, Any]] = []
        self.unloads: list[str] = []
        self.max_model_len = 128
        self.is_raw = False  # log-probabilities before the temperature
        self.refusals: dict[str, tuple[int, str]] = {}  # by path
        self.change: Change = lambda reply: None  # of what is replied about an adapter
        self.change_base: Change = lambda reply: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def plain(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()

    def load(self, body: dict[str, Any]) -> tuple[int, str]:
        name, path = body["lora_name"], body["lora_path"]
        if not name or not path:
            words = "Both 'lora_name' and 'lora_path' must be provided."
            return refused(400, words, "InvalidUserInput")
        if name in self.models:
            words = f"The lora adapter '{name}' has already been loaded."
            return refused(400, words, "InvalidUserInput")
        model = PeftModel.from_pretrained(self.plain(), path).eval()
        self.models[name] = model
        weights = {key: w.clone() for key, w in model.state_dict().items() if "lora_B" in key}
        self.loads.append({"name": name, "path": path, "lora_B": weights})
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: dict[str, Any]) -> tuple[int, str]:
        name = body["lora_name"]
        if name not in self.models:
            return refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self.models[name]
        self.unloads.append(name)
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def complete(self, body: dict[str, Any]) -> tuple[int, str]:
        is_base = body["model"] == BASE
        if not is_base:
            self.asked.append(body)
        choices = [self.choice(body, index) for index in range(body["n"])]
        reply = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1764423000,
            "model": body["model"],
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {"prompt_tokens": len(body["prompt"]), "total_tokens": 9},
            "kv_transfer_params": None,
        }
        (self.change_base if is_base else self.change)(reply)
        return 200, json.dumps(reply)

    @torch.no_grad()
    def choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        model, prompt = self.models[body["model"]], body["prompt"]
        generator = torch.Generator().manual_seed(body["seed"] + index)
        tokens: list[int] = []
        logprobs, tops = list[float](), list[dict[str, float]]()
        while len(tokens) < body["max_tokens"]:
            logits_V = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            divisor = body["temperature"] or 1.0
            logps_V = (logits_V / divisor).log_softmax(-1)
            drawn = torch.multinomial(logps_V.exp(), 1, generator=generator)
            token = int(drawn if body["temperature"] else logps_V.argmax())
            shown_V = logits_V.log_softmax(-1) if self.is_raw else logps_V
            tokens.append(token)
            logprobs.append(shown_V[token].item())
            shown = str(self.tokenizer.decode(token))
            tops.append({shown: logprobs[-1], "top": shown_V.max().item()})
            if token in body["stop_token_ids"]:
                break
        is_stopped = tokens[-1] in body["stop_token_ids"]
        return {
            "index": index,
            "text": self.tokenizer.decode(tokens, skip_special_tokens=True),
            "logprobs": {
                "text_offset": [0] * len(tokens),
                "token_logprobs": logprobs,
                "tokens": [self.tokenizer.decode(token) for token in tokens],
                "top_logprobs": tops,
            },
            "finish_reason": "stop" if is_stopped else "length",
            "stop_reason": tokens[-1] if is_stopped else None,
            "token_ids": tokens,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt,
        }

    def list_models(self, body: dict[str, Any]) -> tuple[int, str]:
        cards = [
            {"id": name, "object": "model", "max_model_len": self.max_model_len if n == 0 else None}
            for n, name in enumerate(list(self.models))
        ]
        return 200, json.dumps({"object": "list", "data": cards})


def refused(status: int, message: str, kind: str) -> tuple[int, str]:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return status, json.dumps({"error": error})


class Handler(BaseHTTPRequestHandler):
    server: FakeVllm

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: dict[str, Any]) -> None:
        ours = self.server
        paths = {
            "/v1/models": ours.list_models,
            "/v1/completions": ours.complete,
            "/v1/load_lora_adapter": ours.load,
            "/v1/unload_lora_adapter": ours.unload,
        }
        status, text = ours.refusals.get(self.path) or paths[self.path](body)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/v1/elsewhere")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server(model_dir: Path) -> Iterator[FakeVllm]:
    with FakeVllm(model_dir) as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def by_server(write_recipe: RecipeWriter, folder: Path, server: FakeVllm, **sections: Any) -> Path:
    objective = {"sampler": server.url, **sections.pop("objective", {})}
    train = {"steps": 2, **sections.pop("train", {})}
    return online(write_recipe, folder, objective=objective, train=train, **sections)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "loss": "rloo", "beta": 0.0}])
def test_a_run_learns_from_what_a_server_samples_with_its_adapter(
    settings: dict[str, Any],
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    server: FakeVllm,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = by_server(write_recipe, tmp_path, server, objective=settings, output={"eval_every": 2})
    assert run("finetune", recipe, "--machine", machine_file) == 0
    assert f"by the server at {server.url}" in " ".join(capsys.readouterr().out.split())
    run_dir = tmp_path / "run"
    # the server has had the adapter of each round under a name of its own, and the last one
    names = [one["name"] for one in server.loads]
    assert server.unloads == names
    first, second, last = ({one["name"]: one["lora_B"] for one in server.loads}).values()
    assert not any(value.any() for value in first.values())  # a new adapter changes nothing
    assert any(value.any() for value in second.values())
    trained = adapter(run_dir)
    for name, value in last.items():
        assert torch.equal(value, trained[name.replace(".default", "")])
    assert list((run_dir / "rounds").glob("*adapter*")) == []
    # it was asked by the chat template's tokens, and what it answered is learned from
    known = open_round(run_dir)["answers"]
    sampled = [one for one in server.asked if one["n"] == NUM_ANSWERS]
    assert len(sampled) == 2 * 3
    lines = [line for step in (1, 2) for line in round_of(run_dir, step)][::NUM_ANSWERS]
    prompts = {tuple(one["prompt"]): one for one in sampled}
    for line in lines:
        turns = [{"role": "user", "content": line["prompt"]}]
        text: Any = server.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, enable_thinking=False, tokenize=False
        )
        one = prompts[tuple(server.tokenizer.encode(text, add_special_tokens=False))]
        assert (one["temperature"], one["max_tokens"]) == (settings.get("temperature", 1.0), MOST)
        assert one["stop_token_ids"]
        assert FIXED.items() <= one.items()
    assert len({one["seed"] for one in sampled}) == len(sampled)
    assert all(len(several) == NUM_ANSWERS for several in known)
    # held-out prompts are answered once, by the most probable tokens
    assert {one["temperature"] for one in server.asked if one["n"] == 1} == {0.0}
    for row in rows_of(run_dir):
        assert row["sampling/sampling_logp_difference/mean"] < 1e-5
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert row["sample_s"] > 0
        assert "predicted_sample_s" not in row


def test_answers_that_are_known_are_not_sampled_again_by_a_server(
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    server: FakeVllm,
) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def reward(prompt, answer, row):\n    raise ValueError\n")
    settings = {"rewards": str(rewards)}
    recipe = by_server(write_recipe, tmp_path, server, objective=settings, train={"steps": 1})
    assert run("finetune", recipe, "--machine", machine_file) == 1
    assert len(server.asked) == 3
    rewards.write_text("def reward(prompt, answer, row):\n    return len(answer)\n")
    words = ("finetune", recipe, "--machine", machine_file, "--resume")
    assert run(*words, f"objective.sampler={server.url}/") == 0  # an address may change
    assert len(server.asked) == 3
    assert rows_of(tmp_path / "run")[0]["sample_s"] == 0.0


def test_an_adapter_that_a_killed_run_has_left_is_unloaded(
    tmp_path: Path, write_recipe: RecipeWriter, machine_file: Path, server: FakeVllm
) -> None:
    recipe = by_server(write_recipe, tmp_path, server, train={"steps": 1})
    words = ("finetune", recipe, "--machine", machine_file)
    server.refusals["/v1/unload_lora_adapter"] = (500, "no")
    assert run(*words) == 0
    (left,) = (one["name"] for one in server.loads)
    server.models["another"] = server.models[left]
    server.refusals.clear()
    assert run(*words, "--overwrite") == 0  # with the same weights, so by the same name
    assert server.unloads == [left, left]
    assert "another" in server.models


def first(reply: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = reply["choices"][0]
    return found


def without_token_ids(reply: dict[str, Any]) -> None:
    first(reply)["token_ids"] = None


# What is wrong with a reply, and what the error says.
ODD: tuple[tuple[Change, str], ...] = (
    (without_token_ids, "a reply in which choices.0.token_ids is wrong"),
    (lambda reply: first(reply).update(logprobs=None), "choices.0.logprobs is wrong"),
    (lambda reply: reply["choices"].pop(), "gives 0 answers to a prompt, and 1 were asked for"),
    (lambda reply: first(reply)["prompt_token_ids"].append(1), "answers to another prompt"),
    (lambda reply: first(reply)["token_ids"].append(1), "2 tokens, and at most 1 were asked for"),
    (
        lambda reply: first(reply)["logprobs"]["token_logprobs"].append(-1.0),
        "another number of log-probabilities than of tokens",
    ),
    (
        lambda reply: first(reply)["logprobs"].update(token_logprobs=[7.5]),  # a logit
        "choices.0.logprobs.token_logprobs.0 is wrong",
    ),
    (lambda reply: reply.clear(), "a reply in which choices is wrong"),
)


@pytest.mark.parametrize(("change", "words"), ODD)
def test_a_server_that_says_something_else_is_refused(
    change: Change, words: str, server: FakeVllm
) -> None:
    server.change_base = change
    section: Any = SimpleNamespace(sampler=server.url, temperature=1.0)
    with pytest.raises(ServerError) as found:
        require_server(section)
    assert words in found.value.what
    assert "vLLM 0.10.2 or later" in str(found.value)


def test_a_server_that_does_not_reply_in_time_is_named(server: FakeVllm) -> None:
    ends = threading.Event()

    def slow(body: dict[str, Any]) -> tuple[int, str]:
        ends.wait(10)
        return 200, "{}"

    server.list_models = slow  # type: ignore[method-assign]  # of this server alone
    with pytest.raises(ServerError, match=r"has not answered /v1/models in 0.2 s"):
        Server(url=server.url, timeout_s=0.2).models()
    ends.set()


REFUSED = (
    ({"/v1/load_lora_adapter": (404, '{"detail":"Not Found"}')}, "cannot load an adapter"),
    ({"/v1/models": (302, "")}, "refuses /v1/models with status 302"),
    ({"/v1/models": (401, '{"error":"Unauthorized"}')}, "Unauthorized"),
)


@pytest.mark.parametrize(("refusals", "words"), REFUSED)
def test_a_server_that_cannot_sample_for_a_run_is_refused(
    refusals: dict[str, tuple[int, str]], words: str, server: FakeVllm
) -> None:
    server.refusals = refusals
    section: Any = SimpleNamespace(sampler=server.url, temperature=1.0)
    with pytest.raises(ServerError, match=words):
        require_server(section)


def test_log_probabilities_without_the_temperature_are_refused(server: FakeVllm) -> None:
    server.is_raw = True
    require_server(SimpleNamespace(sampler=server.url, temperature=1.0))  # type: ignore[arg-type]
    section: Any = SimpleNamespace(sampler=server.url, temperature=0.7)
    with pytest.raises(ServerError, match="log-probabilities without the temperature") as found:
        require_server(section)
    assert "`--logprobs-mode processed_logprobs`" in str(found.value)
    server.is_raw = False
    require_server(section)


def test_a_server_that_is_not_there_is_named_before_the_model_is_loaded(
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    server: FakeVllm,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = by_server(write_recipe, tmp_path, server)
    server.shutdown()
    server.server_close()
    assert run("finetune", recipe, "--machine", machine_file) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f"{server.url} does not answer /v1/models" in error
    assert "vllm serve MODEL --enable-lora" in error
    assert not (tmp_path / "run" / "rounds").exists()


def test_a_server_without_room_for_the_longest_answer_is_named_before_step_1(
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    server: FakeVllm,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.max_model_len = 16
    recipe = by_server(write_recipe, tmp_path, server)
    assert run("finetune", recipe, "--machine", machine_file) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "takes 16 tokens, and the longest prompt has" in error
    assert server.loads == []


def with_token(token: int) -> Change:
    def change(reply: dict[str, Any]) -> None:
        first(reply)["token_ids"][0] = token

    return change


def cut(reply: dict[str, Any]) -> None:
    for part in (first(reply), first(reply)["logprobs"]):
        for name in ("token_ids", "token_logprobs", "top_logprobs"):
            if name in part:
                del part[name][2:]
    first(reply)["token_ids"][:] = [5, 5]


# What is wrong in a round, and what the error says.
IN_A_ROUND: tuple[tuple[dict[str, Any], str], ...] = (
    ({"change": with_token(999_999)}, "gives the token 999999, and the model has"),
    ({"change": cut}, "an answer of 2 tokens that no stop token ends"),
    ({"no_load": True}, "rank 16 is above 8"),
)


@pytest.mark.parametrize(("faults", "words"), IN_A_ROUND)
def test_what_goes_wrong_in_a_round_ends_the_run_which_goes_on_later(
    faults: dict[str, Any],
    words: str,
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    server: FakeVllm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = by_server(write_recipe, tmp_path, server, train={"steps": 1})
    command = ("finetune", recipe, "--machine", machine_file)
    with monkeypatch.context() as patch:
        if faults.pop("no_load", False):
            load, reply = server.load, refused(500, "rank 16 is above 8", "InternalServerError")
            patch.setattr(server, "load", lambda x: reply if x["lora_name"] else load(x))
        for name, value in faults.items():
            patch.setattr(server, name, value)
        assert run(*command) == 1
    assert words in " ".join(capsys.readouterr().err.split())
    assert [*server.models] == [BASE]
    assert not (tmp_path / "run" / "rounds" / "adapter").exists()
    assert run(*command, "--resume") == 0
    assert len(rows_of(tmp_path / "run")) == 1
