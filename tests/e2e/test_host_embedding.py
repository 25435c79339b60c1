"""Runs whose input embedding waits in RAM: the same bits, in all that a run and its commands do."""

import json
import signal

import pytest

from offload.plan.memory.memory import EMBEDDINGS, OUTER, ROWS
from tests.e2e.runs import assert_same_training, losses, rows_of, run, same_adapter

ON_HOST = "offload.embeddings=host"


@pytest.mark.thorough
def test_a_run_its_evaluation_its_samples_and_its_answers_are_the_same(
    tmp_path, write_recipe, machine_file, rows_file, capsys
) -> None:
    recipe = write_recipe(output={"eval_every": 3}, report={"samples": 2})
    shown = {}
    for place in ("device", "host"):
        folder = tmp_path / place
        words = ("--machine", machine_file, f"offload.embeddings={place}", f"output.dir={folder}")
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
    terms = {term["name"]: term["num_bytes"] for term in measured["memory"] if term["is_on_host"]}
    predicted = predicted["calibrated"]["predicted"]
    in_ram = predicted["host_memory"]
    assert terms[EMBEDDINGS] == in_ram[EMBEDDINGS]
    assert 0 < terms[ROWS] <= in_ram[ROWS]
    device = {term["name"]: term["num_bytes"] for term in measured["memory"]}[OUTER]
    assert device == predicted["device_memory"][OUTER]


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_bit(tmp_path, write_recipe, machine_file, forked) -> None:
    recipe = write_recipe(train={"steps": 8})
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    words = ("--machine", machine_file, ON_HOST)
    assert run("finetune", recipe, *words[:2], f"output.dir={whole}") == 0
    metrics = run_dir / "metrics.jsonl"
    process = forked.start("finetune", recipe, *words)
    process.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    process.end(signal.SIGKILL)
    assert run("finetune", recipe, *words, "--resume") == 0
    assert losses(run_dir) == losses(whole)
    assert same_adapter(run_dir, whole)


@pytest.mark.slow
def test_two_ranks_have_it_once_and_train_alike(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe()
    words = ("finetune", recipe, "--machine", machine_file, ON_HOST)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'two'}")
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert_same_training(tmp_path / "two", tmp_path / "one")
