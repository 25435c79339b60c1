"""Runs whose layers wait encoded: killed and resumed, in either tier, and by two ranks."""

import signal

import pytest
import torch

from tests.e2e.runs import adapter, assert_same_training, losses, run


@pytest.mark.slow
def test_layers_in_ram_and_on_disk_train_alike_and_the_store_is_built_once(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(offload={"device": "cpu", "num_slots": 2, "codec": "nf4"})
    words = ("finetune", recipe, "--machine", machine_file)
    found = {}
    for tier in ("ram", "disk"):
        folder = tmp_path / tier
        assert run(*words, f"offload.tier={tier}", f"output.dir={folder}") == 0
        found[tier] = losses(folder), adapter(folder)
    assert capsys.readouterr().out.count("Wrote the layers of") == 1
    assert len(list((tmp_path / "cache" / "sluice" / "stores").glob("*.store"))) == 1
    assert found["ram"][0] == found["disk"][0]
    weights = found["disk"][1]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found["ram"][1].items())
    assert run(*words, "offload.codec=native", f"output.dir={tmp_path / 'native'}") == 0
    assert losses(tmp_path / "native") != found["ram"][0]


@pytest.mark.exhaustive
def test_a_killed_encoded_run_resumes_to_the_bit(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe(
        train={"steps": 8}, offload={"device": "cpu", "num_slots": 2, "codec": "nf4"}
    )
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    assert run("finetune", recipe, "--machine", machine_file, f"output.dir={whole}") == 0
    metrics = run_dir / "metrics.jsonl"
    process = forked.start("finetune", recipe, "--machine", machine_file)
    process.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    process.end(signal.SIGKILL)
    assert run("finetune", recipe, "--machine", machine_file, "--resume") == 0
    assert losses(run_dir) == losses(whole)
    resumed, uninterrupted = adapter(run_dir), adapter(whole)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)


@pytest.mark.slow
def test_two_ranks_share_one_encoded_slab(tmp_path, write_recipe, machine_file, forked) -> None:
    recipe = write_recipe(offload={"device": "cpu", "num_slots": 2, "codec": "nf4"})
    words = ("finetune", recipe, "--machine", machine_file)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'two'}")
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert ", shared by 2 ranks" in ranks[0].shown
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert_same_training(tmp_path / "two", tmp_path / "one")
