"""What is reported of a run that samples its own answers; all its figures are made up."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune.errors import CheckpointError
from finetune.report.compared_runs import COLUMNS, figures_of, read_runs
from finetune.report.explain import compared, explain, learned_rows
from finetune.report.pages import run_page
from finetune.report.rounds import learned_by
from finetune.report.rows import as_text
from finetune.run.run_dir import RunDir
from tests.unit.finetune.report.made_up import EVALUATED, NUM_ROUNDS, a_run_of_rounds, write_round
from tests.unit.finetune.report.seen import Seen, specs

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e" + "&" * 100_000


def shown(folder: Path) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(as_text(compared(explain(folder)), is_compact=True))
    return " ".join(capture.get().split())


def test_a_step_is_compared_without_sampling_and_sampling_with_its_own_prediction(
    tmp_path: Path,
) -> None:
    found = explain(a_run_of_rounds(tmp_path))
    (section,) = found.sections
    step = section.comparison[0]
    apart = {miss.name: miss.difference_s for miss in section.misses if miss.difference_s}
    assert apart == {"backward": 1.0, "outside the pass": 0.125, "data wait": 0.0625}
    assert found.rounds is not None
    phases = {one.name: (one.predicted_s, one.measured_s) for one in found.rounds.phases(section)}
    assert phases == {
        "sampling": (1.0, 2.0),
        "rewards": (None, 0.25),
        "other waits": (None, 0.0625),
        "learning": (step.predicted, step.measured),
    }
    text = shown(tmp_path)
    assert "a step took 1.19 s longer than predicted" in text
    whole_s = 2.3125 + step.measured
    assert (
        "Before each step, sampling took 2.00 s (predicted 1.00 s, error -50%), 64 tokens/s, and"
        f" rewards 250.00 ms; a whole round took {whole_s:.2f} s" in text  # 128 tokens
    )
    assert "step 1 to 5: 0.1000 -> 0.5000; of held-out prompts: 0.2500 before" in text
    assert "0.7500 after step 5" in text


def test_a_round_that_was_sampled_before_a_resume_has_no_part_in_the_mean(tmp_path: Path) -> None:
    a_run_of_rounds(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    first, *others = [json.loads(line) for line in metrics.read_text().splitlines()]
    first |= {"sample_s": 0.0, "predicted_sample_s": 0.0, "reward_s": 0.0}
    first["phases_s"]["data wait"] = first["parts_s"]["data wait"] = 0.0625
    metrics.write_text("".join(json.dumps(row) + "\n" for row in (first, *others)))
    assert "sampling took 2.00 s (predicted 1.00 s, error -50%), 64 tokens/s" in shown(tmp_path)
    metrics.write_text(json.dumps(first) + "\n")
    assert "sampling" not in shown(tmp_path)
    assert "A round, phase by phase" in run_page(tmp_path)


def test_programs_get_the_same_figures(tmp_path: Path) -> None:
    found = explain(a_run_of_rounds(tmp_path)).to_json()["rounds"]
    assert found["phases"]["sampling"] == {"predicted_s": 1.0, "measured_s": 2.0}
    assert (found["num_answers"], found["sampled_tokens_per_s"]) == (16, 64.0)
    assert found["reward"] == {"first": 0.1, "last": 0.5}
    assert found["held_out_reward"] == {"before": 0.25, "last": 0.75}


def test_the_page_draws_rewards_lengths_and_shares_and_kl_where_there_is_one(
    tmp_path: Path,
) -> None:
    text = run_page(a_run_of_rounds(tmp_path))
    for said in (
        "reward of held-out prompts 0.2500 -> 0.7500 before training -> step 5",
        "reward of sampled answers 0.1000 -> 0.5000 step 1 -> step 5",
        "sampling took 2.00 s predicted 1.00 s, error -50%",
    ):
        assert said in Seen(text).text
    drawn = specs(text)
    assert {"reward", "lengths", "shares", "functions", "loss"} <= set(drawn)
    assert not {"kl", "eval"} & set(drawn)
    for name in drawn:  # each has its place
        assert f'id="{name}"' in text
    points = [(one["run"], one["step"], one["reward"]) for one in drawn["reward"]["data"]["values"]]
    assert points == [
        *(("sampled answers", step, step / 10) for step in range(1, 6)),
        *(("held-out prompts", step, value) for step, value in ((0, 0.25), *EVALUATED.items())),
    ]
    assert "0.1 in step 1, 0.5 in step 5" in drawn["reward"]["description"]
    assert {one["run"] for one in drawn["functions"]["data"]["values"]} == {"exact_match", "short"}
    assert [one["tokens"] for one in drawn["lengths"]["data"]["values"]] == [8.0] * NUM_ROUNDS
    with_kl = specs(run_page(a_run_of_rounds(tmp_path / "kl", kl=0.125)))
    assert [one["nats"] for one in with_kl["kl"]["data"]["values"]] == [0.125] * NUM_ROUNDS


def test_the_page_has_the_best_and_the_worst_answer_of_three_rounds(tmp_path: Path) -> None:
    a_run_of_rounds(tmp_path)
    write_round(tmp_path, 1, [("even", "a", 0.5), ("even", "b", 0.5), ("p1", "lost", None)])
    write_round(tmp_path, 2, [("unseen", "no", 1.0)])
    differ = [("p3", "low", -1.0), ("p3", "mid", 0.0), ("p3", "cut", 1.0), ("p3", "failed", None)]
    write_round(tmp_path, 3, [("same", "c", 5.0), ("same", "d", 5.0), *differ])
    text = Seen(run_page(tmp_path)).text
    assert "1, all 2 even a 0.5000" in text
    assert "3, best of 3, cut off p3 cut 1.0000" in text
    assert "3, worst of 3 p3 low -1.0000" in text
    for word in ("unseen", "lost", "mid", "failed"):
        assert f" {word} " not in text
    assert "Answers by round" not in run_page(a_run_of_rounds(tmp_path / "none"))


def test_a_hostile_answer_is_text_that_is_short(tmp_path: Path) -> None:
    a_run_of_rounds(tmp_path)
    plain = len(run_page(tmp_path))
    write_round(tmp_path, 5, [(HOSTILE, HOSTILE, 1.0), (HOSTILE, "\ud7ff", 0.0)])
    page = run_page(tmp_path)
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in page
    assert len(page) - plain < 10_000
    page.encode()
    file = tmp_path / "rounds" / "000005.jsonl"
    file.write_text(
        json.dumps({"row": "1", "prompt": "\ud800", "answer": "", "reward": 1.0, "is_cut": False})
    )
    run_page(tmp_path).encode()


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"prompt": "\xff"}', b'{"prompt": "a", "answer": 1, "reward": 1}']
)
def test_a_damaged_file_of_answers_is_named(content: bytes, tmp_path: Path) -> None:
    file = write_round(a_run_of_rounds(tmp_path), 1, [])
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"000001\.jsonl(.|\n)*remove it"):
        run_page(tmp_path)


@pytest.mark.parametrize("change", [{"sample_s": -1.0}, {"reward": "no"}, {"reward_s": None}])
def test_a_line_that_is_no_round_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step 1 is no round"):
        explain(a_run_of_rounds(tmp_path, **change))


def test_what_was_learned_is_a_reward(tmp_path: Path) -> None:
    rows = explain(a_run_of_rounds(tmp_path)).rounds
    assert rows is not None
    facts = {row.label: row.value for row in learned_rows(rows.rows, step=3)}
    assert facts["mean reward, step 1"] == 0.1
    assert facts["mean reward, step 3"] == 0.3
    assert facts["mean reward of held-out prompts, step 3"] == 0.5
    assert not [label for label in facts if "held-out loss" in label]


def test_a_card_says_by_what_rewards_it_learned(tmp_path: Path) -> None:
    recipe = RunDir(a_run_of_rounds(tmp_path)).recipe()
    report: dict[str, Any] = {"adapter_step": 5, "held_out": {}}
    words = "exact_match, short, 5 rounds of 4 prompts with 4 answers each"
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    assert learned_by(recipe, tmp_path).strip() == f"It learned by reward: {words}."
    report["held_out"] = {"before": {"eval_reward": 0.25}, "after": {"eval_reward": 0.75}}
    file.write_text(json.dumps(report))
    said = f"It learned by reward: {words}; mean reward of held-out prompts 0.25 -> 0.75."
    assert learned_by(recipe, tmp_path).strip() == said


def test_runs_are_compared_by_reward(tmp_path: Path) -> None:
    runs = read_runs([a_run_of_rounds(tmp_path / name) for name in ("one", "two")])
    figures = dict(zip([name.split("|")[0] for name in COLUMNS], figures_of(runs[0]), strict=True))
    assert figures["reward"] == "0.1000 -> 0.5000"
