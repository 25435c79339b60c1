"""Clients of the Tinker SDK on a server of a tiny model: alone, together, and after a kill."""

import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

from tests.serving import NAME, Served, row, save_base, served, service

pytestmark = pytest.mark.slow
ADAM = types.AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=0.5)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module", params=["tied", "mixture"])
def other_base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp(request.param), kind=request.param)


@pytest.fixture(scope="module")
def server(
    base: Path, tmp_path_factory: pytest.TempPathFactory, machine_file: Path
) -> Iterator[Served]:
    with served(base, tmp_path_factory.mktemp("served"), machine_file, "--clients", "6") as found:
        yield found


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Two processes for clients."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as found:
        yield found


def ids(seed: int, num: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (num,), generator=generator).tolist()


def weights(seed: int, num: int) -> list[float]:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)).tolist()


def supervised(seed: int) -> list[types.Datum]:
    """Return rows of several lengths, with targets that are not their next tokens."""
    return [
        row(ids(seed + n, num), ids(seed + n + 50, num), weights=weights(seed + n, num))
        for n, num in enumerate((7, 12, 5))
    ]


def rewarded(seed: int, old: list[list[float]]) -> list[types.Datum]:
    rows = []
    for n, logprobs in enumerate(old):
        num = len(logprobs)
        rows.append(
            row(
                ids(seed + n, num),
                ids(seed + n + 50, num),
                logprobs=[x + 0.3 * y for x, y in zip(logprobs, weights(n, num), strict=True)],
                advantages=weights(seed + n, num),
            )
        )
    return rows


def preferring(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
    """A loss of the client's own."""
    loss = torch.nn.functional.softplus(logprobs[1].sum() - logprobs[0].sum())
    return loss, {"margin": float(loss.detach())}


def story(own: tinker.ServiceClient, seed: int, *, chunk: int) -> dict[str, Any]:
    """Let a client train and sample in all ways; return all that it gets."""
    client = own.create_lora_training_client(
        base_model=NAME, rank=4 if seed % 2 else 8, seed=seed, train_unembed=bool(seed % 2)
    ).result()
    settings = client.holder._client_config
    client.holder._client_config = settings.model_copy(update={"fwdbwd_max_chunk_len": chunk})
    got: dict[str, Any] = {}
    for turn in range(2):
        first = client.forward_backward(supervised(10 * seed + turn), "cross_entropy")
        second = client.forward_backward(supervised(10 * seed + turn + 5), "cross_entropy")
        step = client.optim_step(ADAM)
        got[f"sft {turn}"] = plain(first.result()), plain(second.result()), step.result().metrics
    before = client.forward(supervised(seed), "cross_entropy").result()
    old = [one["logprobs"].tolist() for one in before.loss_fn_outputs]
    losses: list[tuple[Any, Any]] = [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", None),
        ("dro", {"beta": 0.1}),
    ]
    for loss, config in losses:
        got[loss] = plain(client.forward_backward(rewarded(seed, old), loss, config).result())
    custom = client.forward_backward_custom(supervised(seed)[:2], preferring)
    step = client.optim_step(ADAM)
    got["custom"] = custom.result().metrics
    got["step"] = step.result().metrics
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(ids(seed, 5))
    params = types.SamplingParams(max_tokens=6, temperature=0.8)
    answers = [sampler.sample(prompt, 2, params) for _ in range(3)]
    got["samples"] = [[(x.tokens, x.logprobs) for x in one.result().sequences] for one in answers]
    got["prompt"] = sampler.compute_logprobs(prompt).result()
    path = client.save_state("end").result().path
    got["path"] = path
    return got


def story_by(address: str, key: str, seed: int, chunk: int) -> dict[str, Any]:
    with service(address, key) as own:
        return story(own, seed, chunk=chunk)


def plain(found: types.ForwardBackwardOutput) -> Any:
    return found.metrics, [one["logprobs"].tolist() for one in found.loss_fn_outputs]


def saved(server: Served, path: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    records = (server.folder / "checkpoints").glob("*/checkpoint.json")
    run, kind, name = path.removeprefix("tinker://").split("/")
    found = [
        one.parent
        for one in records
        if f'"run": "{run}"' in one.read_text() and f'"name": "{name}"' in one.read_text()
    ]
    assert len(found) == 1
    assert kind == "weights"
    return {
        name: x for file in found[0].glob("*.safetensors") for name, x in load_file(file).items()
    }


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[x], other[x]) for x in one)


def test_clients_at_once_get_what_each_gets_alone(
    server: Served, processes: ProcessPoolExecutor
) -> None:
    where = server.address, server.key
    alone = [processes.submit(story_by, *where, seed, 1024).result() for seed in (1, 2)]
    both = [processes.submit(story_by, *where, seed, 1024) for seed in (1, 2)]
    for one, future in zip(alone, both, strict=True):
        other = future.result()
        assert is_same(saved(server, one.pop("path")), saved(server, other.pop("path")))
        assert one == other
    assert alone[0] != alone[1]


def test_chunks_give_the_same_adapter(server: Served, processes: ProcessPoolExecutor) -> None:
    where = server.address, server.key
    whole, cut = (processes.submit(story_by, *where, 3, chunk).result() for chunk in (1024, 2))
    assert is_same(saved(server, whole["path"]), saved(server, cut["path"]))


def supervise(address: str, key: str) -> tuple[list[str], list[float], list[float]]:
    """Train for three steps; return what was saved before and after, losses and norms."""
    losses, norms = [], []
    with service(address, key) as own:
        client = own.create_lora_training_client(base_model=NAME, rank=4, seed=5).result()
        start = client.save_state("start").result().path
        for turn in range(3):
            found = client.forward_backward(supervised(turn), "cross_entropy")
            step = client.optim_step(ADAM).result()
            losses.append(found.result().metrics["loss:sum"])
            assert step.metrics is not None
            norms.append(step.metrics["grad_norm:mean"])
        end = client.save_state("end").result().path
    return [start, end], losses, norms


def test_plain_torch_and_peft_give_the_same(
    server: Served, base: Path, processes: ProcessPoolExecutor
) -> None:
    found = processes.submit(supervise, server.address, server.key).result()
    _require_plain(server, base, *found)


def test_a_tied_head_and_a_mixture_train_as_in_plain_torch_and_peft(
    other_base: Path, tmp_path: Path, machine_file: Path, processes: ProcessPoolExecutor
) -> None:
    with served(other_base, tmp_path, machine_file) as one:
        found = processes.submit(supervise, one.address, one.key).result()
    _require_plain(one, other_base, *found)


def _require_plain(
    server: Served, base: Path, paths: list[str], losses: list[float], norms: list[float]
) -> None:
    """Do the steps of `supervise` by plain torch and peft, and compare."""
    start, end = (saved(server, path) for path in paths)
    ends = {name.removesuffix(".lora_A.weight").rpartition(".")[2] for name in start}
    names = {end for end in ends if end != "weight"}
    assert {"q_proj", "o_proj", "lm_head"} <= names
    config = LoraConfig(r=4, lora_alpha=32, target_modules=sorted(names))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of an adapter on a tied head
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    named = {name.replace(".default", ""): p for name, p in model.named_parameters()}
    own = {name: parameter for name, parameter in named.items() if "lora" in name}
    assert own.keys() <= start.keys()
    for name, parameter in own.items():
        parameter.data.copy_(start[name])
    adam = torch.optim.AdamW(own.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for turn in range(3):
        value = torch.zeros(())
        for datum in supervised(turn):
            tokens, given = torch.tensor([datum.model_input.to_ints()]), datum.loss_fn_inputs
            logps = model(input_ids=tokens).logits[0].log_softmax(-1)
            logps_T = logps.gather(1, given["target_tokens"].to_torch()[:, None])[:, 0]
            value = value - (logps_T * given["weights"].to_torch()).sum()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(own.values(), 0.5)
        adam.step()
        adam.zero_grad()
        assert float(value.detach()) == pytest.approx(losses[turn], rel=1e-5)
        assert float(norm) == pytest.approx(norms[turn], rel=1e-4)
    for name, parameter in own.items():
        apart = (parameter.detach() - end[name]).norm() / end[name].norm()
        assert apart < 1e-4, name


def sample_from_saved(address: str, key: str, prompt: list[int]) -> tuple[str, Any]:
    """Return the path of a checkpoint, and log-probabilities of a prompt by it."""
    with service(address, key) as own:
        client = own.create_lora_training_client(base_model=NAME, rank=4, seed=6).result()
        client.forward_backward(supervised(1), "cross_entropy")
        client.optim_step(ADAM).result()
        path = client.save_state("saved").result().path
        sampled = client.save_weights_for_sampler("sampled").result().path
        sampler = own.create_sampling_client(model_path=sampled).result()
        return path, sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()


def test_a_checkpoint_is_an_adapter_of_peft(
    server: Served, base: Path, tmp_path: Path, processes: ProcessPoolExecutor
) -> None:
    prompt = ids(1, 9)
    where = server.address, server.key
    path, found = processes.submit(sample_from_saved, *where, prompt).result()
    assert path in server.tool("-f", "json", "checkpoint", "list")
    server.tool("checkpoint", "download", path, "--output", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    with torch.no_grad():
        logps = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = logps[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert found[0] is None
    assert found[1:] == pytest.approx(wanted.tolist(), abs=1e-5)
    server.tool("checkpoint", "delete", path, "--yes")
    assert path not in server.tool("-f", "json", "checkpoint", "list")


def recipe(address: str, key: str, log: Path, stop: tuple[int, str] | None) -> str:
    """Train as recipes do: from the last checkpoint, if there is one; save after every step.

    Args:
        address: The server's.
        key: Its key.
        log: Paths of checkpoints, a line each.
        stop: Where to return early: the number of a step, and "within" it or "after" it.
    """
    done = log.read_text().split() if log.exists() else []
    own, path = tinker.ServiceClient(base_url=address, api_key=key), ""
    if done:
        client = own.create_training_client_from_state_with_optimizer(done[-1]).result()
    else:
        client = own.create_lora_training_client(base_model=NAME, rank=8, seed=7).result()
    for step in range(len(done), 4):
        first = client.forward_backward(supervised(step), "cross_entropy")
        if stop == (step, "within"):
            first.result()
            return path
        second = client.optim_step(ADAM)
        first.result()
        second.result()
        path = client.save_state(f"step_{step}").result().path
        with log.open("a") as file:
            file.write(f"{path}\n")
        if stop == (step, "after"):
            return path
    return path


def test_a_killed_server_goes_on_to_the_bit(
    base: Path,
    tmp_path: Path,
    machine_file: Path,
    server: Served,
    processes: ProcessPoolExecutor,
) -> None:
    end = processes.submit(recipe, server.address, server.key, tmp_path / "whole", None).result()
    whole, folder, log = saved(server, end), tmp_path / "served", tmp_path / "log"
    for stop in ((1, "after"), (2, "within")):
        with served(base, folder, machine_file) as one:
            processes.submit(recipe, one.address, one.key, log, stop).result()
            one.kill()
    with served(base, folder, machine_file) as one:
        path = processes.submit(recipe, one.address, one.key, log, None).result()
    assert len(log.read_text().split()) == 4
    assert is_same(saved(one, path), whole)
