"""The benchmark of predictions: what it draws, how it sums up, and one run from end to end."""

import os
from dataclasses import asdict, replace

import pytest

from tests.bench.bench_predict import (
    GOALS,
    NUM_DRAWS,
    SEED,
    arena_error,
    arena_terms,
    measure,
    model_config,
    noise,
    summarise,
    summary_text,
    table_of_rows,
)
from tests.bench.configurations import MIN_SEQ_LEN, SPACES, Configuration, draw

pytestmark = pytest.mark.bench

SMALLEST = Configuration(
    model_type="qwen3_moe",
    num_layers=3,
    hidden=128,
    mlp_ratio=2,
    num_experts=4,
    vocabulary=512,
    num_micro_batches=2,
    num_sequences=1,
    seq_len=MIN_SEQ_LEN,
    num_slots=2,
    dtype="float32",
    codec="nf4",
    tier="disk",
    stash="host",
    targets="all-linear",
)


@pytest.mark.parametrize("device", SPACES)
@pytest.mark.parametrize("seed", [SEED, 0, 1, 2])
def test_a_dozen_draws_are_the_same_again_and_miss_no_value(device: str, seed: int) -> None:
    space = SPACES[device]
    drawn = draw(space, seed=seed, num=NUM_DRAWS)
    assert NUM_DRAWS == len(drawn) == len(set(drawn))
    assert drawn == draw(space, seed=seed, num=NUM_DRAWS)
    assert drawn != draw(space, seed=seed + 1, num=NUM_DRAWS)
    assert drawn == draw(space, seed=seed, num=NUM_DRAWS + 20)[:NUM_DRAWS]
    assert {c.model_type for c in drawn} == set(space.model_types)
    assert {c.num_layers for c in drawn} == set(space.layers)
    assert {c.hidden for c in drawn} == set(space.widths)
    assert {c.num_micro_batches for c in drawn} == set(space.micro_batches)
    assert {(c.dtype, c.codec) for c in drawn} == set(space.forms)
    assert {c.tier for c in drawn} == set(space.tiers)
    assert {c.stash for c in drawn} == set(space.stashes)
    assert {c.targets for c in drawn} == set(space.targets)
    assert {c.has_experts for c in drawn} == {True, False}
    assert {c.num_slots == c.num_layers for c in drawn} == {True, False}
    for c in drawn:
        assert 2 <= c.num_slots <= c.num_layers
        assert MIN_SEQ_LEN <= c.seq_len <= max(space.seq_lens)


@pytest.mark.parametrize("device", SPACES)
def test_a_step_has_about_the_work_that_was_drawn(device: str) -> None:
    space = SPACES[device]
    for c in draw(space, seed=3, num=200):
        mlp = 3 * c.mlp_ratio * c.hidden**2
        active = c.num_layers * (3 * c.hidden**2 + mlp) + c.vocabulary * c.hidden
        work = 6 * active * c.num_tokens
        assert 0.6 * min(space.step_flops) < work < 2 * max(space.step_flops), c


@pytest.mark.parametrize("model_type", SPACES["cpu"].model_types)
def test_a_drawn_mixture_has_two_experts_of_half_the_width_per_token(model_type: str) -> None:
    drawn = draw(SPACES["cpu"], seed=4, num=24)
    c = next(c for c in drawn if c.model_type == model_type)
    fields = model_config(c).to_dict()
    assert fields["num_hidden_layers"] == c.num_layers
    assert fields["vocab_size"] == c.vocabulary
    width = fields.get("moe_intermediate_size", fields["intermediate_size"])
    if c.has_experts:
        assert c.num_experts in (fields.get("num_experts"), fields.get("num_local_experts"))
        assert fields["num_experts_per_tok"] * width == c.mlp_ratio * c.hidden
    else:
        assert width == c.mlp_ratio * c.hidden


def row(time_error: float, memory_error: float, *, is_within: bool = False) -> dict:
    return {
        "time_error": time_error,
        "memory_error": memory_error,
        "is_within_spread": is_within,
        "noise": abs(time_error) / 2,
    }


def test_a_summary_takes_medians_and_the_worst_without_signs() -> None:
    goals = GOALS["cpu"]
    good = [row(-0.24, 0.0), row(0.02, -0.04, is_within=True), row(-0.04, 0.01), row(0.08, 0.02)]
    summary = summarise(good, goals)
    assert summary.median_error == pytest.approx(0.06)
    assert summary.worst_error == 0.24
    assert summary.median_noise == pytest.approx(0.03)
    assert summary.worst_memory_error == 0.04
    assert (summary.num, summary.num_failed, summary.num_within) == (4, 0, 1)
    assert summary.misses_goals == ()
    assert "all goals reached" in summary_text(summary, goals, device="cpu")
    bad = summarise([row(-0.25, -0.05), row(0.10, 0.0), {"error": "it died"}], goals)
    assert bad.misses_goals == (
        "1 failed",
        "median 17.5% is not under 10%",
        "worst 25.0% is not under 25%",
        "memory 5.0% is not under 5%",
    )
    assert (bad.num, bad.num_failed) == (3, 1)
    assert "1 failed; median 17.5%" in summary_text(bad, goals, device="cpu")


def test_runs_that_all_failed_reach_no_goal() -> None:
    rows = [{"error": "it died", "configuration": asdict(SMALLEST)}]
    summary = summarise(rows, GOALS["cuda"])
    assert len(summary.misses_goals) == 4
    assert table_of_rows(rows, title="none").row_count == 1


def test_noise_is_how_far_steps_lie_from_their_median() -> None:
    assert noise([1.0, 1.0, 1.1, 1.2, 9.0]) == pytest.approx(0.1 / 1.1)


def test_arenas_that_only_one_side_knows_are_errors() -> None:
    predicted = {"device_memory": {"slots": 100, "adapters": 7}, "host_memory": {"slab": 300}}
    found = [{"name": "slots", "num_bytes": 100}, {"name": "staging", "num_bytes": 100}]
    terms = arena_terms(predicted, found)
    assert terms == {
        "slots": {"predicted": 100, "measured": 100},
        "slab": {"predicted": 300, "measured": 0},
        "staging": {"predicted": 0, "measured": 100},
    }
    assert arena_error(terms) == pytest.approx(1.0)


@pytest.mark.slow
def test_the_smallest_run_is_measured_and_one_that_cannot_run_says_why(
    tmp_path, machine_file, monkeypatch
) -> None:
    found = measure(SMALLEST, machine_file, device="cpu", num_steps=3, limit_s=60.0)
    assert "error" not in found, found
    assert found["grade"] == "calibrated"
    assert 0 <= found["others_cores"] < (os.cpu_count() or 1)
    assert found["n"] == len(found["steps_s"]) == 3
    assert found["p20"] <= found["p50"] <= found["p80"]
    assert found["time_error"] == pytest.approx(found["predicted"] / found["p50"] - 1)
    assert abs(found["time_error"]) < 9
    assert {"slots", "decoded layer", "stashed layer inputs"} <= found["arenas"].keys()
    assert abs(found["memory_error"]) < 0.2
    rows = [found | {"configuration": asdict(SMALLEST)}]
    assert table_of_rows(rows, title="one").row_count == 1
    # packed weights have to be bfloat16
    wrong = replace(SMALLEST, codec="bf16_packed")
    found = measure(wrong, machine_file, device="cpu", num_steps=3, limit_s=60.0)
    assert found.keys() == {"error"}
    assert "exit status 1: " in found["error"]
    assert "offload.codec" in found["error"]
    found = measure(SMALLEST, machine_file, device="cpu", num_steps=3, limit_s=0.01)
    assert found == {"error": "took more than 0.01 s"}
