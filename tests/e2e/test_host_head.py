"""Runs whose output head waits in RAM: the same bits, in all that a run and its commands do."""

import json
import signal
from typing import Any

import pytest

from offload.engine.passes.head_gradient import HeadGradient
from offload.plan.memory.memory import EMBEDDINGS, HEAD, HEAD_GRADIENT, OUTER, SLOTS
from tests.e2e.full_runs import (
    assert_same_runs,
    assert_trained_alike,
    computing_in,
    full_recipe,
    reported,
)
from tests.e2e.runs import assert_same_training, losses, rows_of, run, same_adapter
from tests.tiers import mostly_slow

ON_HOST = ("offload.head=host", "offload.embeddings=host")


@pytest.mark.thorough
def test_a_run_its_evaluation_its_samples_and_its_answers_are_the_same(
    tmp_path, write_recipe, machine_file, rows_file, capsys
) -> None:
    recipe = write_recipe(output={"eval_every": 3}, report={"samples": 2})
    shown = {}
    for place in ("device", "host"):
        folder = tmp_path / place
        words = ("--machine", machine_file, f"offload.head={place}", f"output.dir={folder}")
        assert run("finetune", recipe, *words) == 0
        capsys.readouterr()
        assert run("generate", folder, "--prompt", "what follows 7", "--max-new-tokens", 4) == 0
        answer = capsys.readouterr().out
        assert run("score", recipe, rows_file, "--base", *words[:3], "--json") == 0
        scored = json.loads(capsys.readouterr().out)["scores"]
        trained = [(row["loss"], row.get("eval_loss")) for row in rows_of(folder)]
        samples = [(folder / f"samples_{when}.json").read_text() for when in ("before", "after")]
        shown[place] = (trained, samples, answer, scored)
    assert shown["device"] == shown["host"]
    assert same_adapter(tmp_path / "device", tmp_path / "host")
    files = ((tmp_path / "host" / f"{name}.json").read_text() for name in ("measured", "predicted"))
    measured, predicted = map(json.loads, files)
    terms = {term["name"]: term["num_bytes"] for term in measured["memory"]}
    calibrated = predicted["calibrated"]
    assert terms[HEAD] == calibrated["predicted"]["host_memory"][HEAD]
    for name in (OUTER, SLOTS):
        assert terms[name] == calibrated["predicted"]["device_memory"][name]
    assert calibrated["head"]["saved_vram_bytes"] == terms[HEAD]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["host", "device"])
def test_a_killed_run_resumes_to_the_bit_in_either_place(
    place, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe(train={"steps": 8})
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    words = ("--machine", machine_file, *ON_HOST)
    assert run("finetune", recipe, *words[:2], f"output.dir={whole}") == 0
    metrics = run_dir / "metrics.jsonl"
    process = forked.start("finetune", recipe, *words)
    process.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    process.end(signal.SIGKILL)
    places = (f"offload.head={place}", f"offload.embeddings={place}")
    assert run("finetune", recipe, *words[:2], *places, "--resume") == 0
    assert losses(run_dir) == losses(whole)
    assert same_adapter(run_dir, whole)


@pytest.mark.slow
def test_two_ranks_train_alike(tmp_path, write_recipe, machine_file, forked) -> None:
    recipe = write_recipe()
    words = ("finetune", recipe, "--machine", machine_file, *ON_HOST)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'two'}")
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert_same_training(tmp_path / "two", tmp_path / "one")
    measured = json.loads((tmp_path / "two" / "measured.json").read_text())
    assert {HEAD, EMBEDDINGS} <= {term["name"] for term in measured["memory"]}


# ---------------------------------------------------------------------------------- one that trains


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float32", "float16"], "bfloat16"))
def test_all_weights_train_alike_and_are_what_plain_transformers_loads(
    dtype, tmp_path, write_recipe, machine_file, model_dir
) -> None:
    recipe = full_recipe(write_recipe, dtype=dtype)
    machine = computing_in(dtype, machine_file, tmp_path)
    for place in ("device", "host"):
        words = ("--machine", machine, f"offload.head={place}", "report.samples=2")
        assert run("finetune", recipe, *words, f"output.dir={tmp_path / place}") == 0
    host, device = tmp_path / "host", tmp_path / "device"
    table = assert_trained_alike(host, device, base=model_dir, name="lm_head.weight")
    terms, on_device, in_ram = reported(host)
    assert terms[HEAD] == in_ram[HEAD] == table.nbytes
    assert terms[HEAD_GRADIENT] == in_ram[HEAD_GRADIENT] == 4 * table.numel()
    others, on_device_before, _ = reported(device)
    assert others[OUTER] - terms[OUTER] == on_device_before[OUTER] - on_device[OUTER]
    assert others[OUTER] - terms[OUTER] == table.nbytes
    assert terms[SLOTS] == on_device[SLOTS]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "place"), [(2, "host"), (5, "host"), (3, "device")])
def test_a_killed_run_of_all_weights_resumes_to_the_bit_in_either_place(
    step, place, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = full_recipe(write_recipe, dtype="bfloat16", steps=8)
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    machine = ("--machine", computing_in("bfloat16", machine_file, tmp_path))
    on_device = ("offload.head=device", "offload.embeddings=device")
    assert run("finetune", recipe, *machine, *on_device, f"output.dir={whole}") == 0
    metrics = run_dir / "metrics.jsonl"
    process = forked.start("finetune", recipe, *machine, *ON_HOST)
    process.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= step)
    process.end(signal.SIGKILL)
    places = (f"offload.head={place}", f"offload.embeddings={place}")
    assert run("finetune", recipe, *machine, *places, "--resume") == 0
    assert_same_runs(run_dir, whole)


@pytest.mark.thorough
def test_a_run_that_has_ended_between_backward_and_update_resumes_to_the_bit(
    tmp_path, write_recipe, machine_file, monkeypatch
) -> None:
    recipe, whole = full_recipe(write_recipe), tmp_path / "whole"
    words = ("--machine", machine_file, "offload.head=host")
    assert run("finetune", recipe, *words, f"output.dir={whole}") == 0
    send_back, num = HeadGradient.send_back, 0

    def send_some(self: HeadGradient, *args: Any, **kwargs: Any) -> None:
        nonlocal num
        num += 1
        if num > 5:  # that of a later step never comes
            raise OSError("killed")
        send_back(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(HeadGradient, "send_back", send_some)
        assert run("finetune", recipe, *words) != 0
    assert len(losses(tmp_path / "run")) < 6
    assert run("finetune", recipe, *words, "--resume") == 0
    assert_same_runs(tmp_path / "run", whole)


@pytest.mark.thorough
def test_a_head_and_some_layers_train_by_name(tmp_path, write_recipe, machine_file) -> None:
    """The embedding is frozen, and all of the head's states are in RAM."""
    recipe = full_recipe(write_recipe)
    words = ("--machine", machine_file, 'train.what=["last_2_layers", "lm_head.*"]')
    for place in ("device", "host"):
        where = (f"offload.head={place}", f"output.dir={tmp_path / place}")
        assert run("finetune", recipe, *words, *where) == 0
    assert_same_runs(tmp_path / "host", tmp_path / "device")
