"""Learning from answers that a run samples itself."""

import json
import shutil
import signal
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.report.explain import explain
from tests.e2e.conftest import RecipeWriter
from tests.e2e.forked import Forked
from tests.e2e.rounds import MOST, NUM_ANSWERS, online, open_round, round_of
from tests.e2e.runs import adapter, losses, rows_of, run, same_adapter

SEED = 0


def test_a_run_samples_rewards_and_learns(
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = online(write_recipe, tmp_path, output={"eval_every": 3})
    assert run("finetune", recipe, "--machine", machine_file) == 0
    shown = capsys.readouterr().out
    assert "before each step: 3 x 4 answers of 6 tokens" in shown
    assert "reward" in shown
    run_dir = tmp_path / "run"
    rows: list[dict[str, Any]] = [*rows_of(run_dir)]
    for step, row in enumerate(rows, 1):
        answers = round_of(run_dir, step)
        assert len(answers) == 3 * NUM_ANSWERS
        rewards = [one["reward"] for one in answers]
        assert row["reward"] == pytest.approx(sum(rewards) / len(rewards))
        for one in answers:
            wanted = sum(c.isdigit() for c in one["answer"]) + 0.1 * len(one["answer"])
            number = int("".join(c for c in one["prompt"] if c.isdigit()))
            wanted += 0.25 * (str(number + 1) in one["answer"])
            assert one["reward"] == pytest.approx(wanted)
            assert 1 <= one["num_tokens"] <= MOST
        assert row["rewards/length/mean"] == pytest.approx(
            sum(len(one["answer"]) for one in answers) / len(answers)
        )
        # decoding with a cache gives the log-probabilities that are learned from
        assert row["sampling/sampling_logp_difference/mean"] < 1e-5
        assert row["phases_s"]["data wait"] >= row["sample_s"] + row["reward_s"]
        assert row["predicted_sample_s"] > 0
    assert len({one["prompt"] for one in round_of(run_dir, 1)}) == 3
    assert rows[-1]["eval_loss"] == -rows[-1]["eval_reward"]
    last = " ".join(shown.rpartition("A step took")[2].split())  # the screen's last lines
    assert "longer than predicted" in last or "shorter than predicted" in last
    assert "Before each step, sampling took" in last
    assert f"{rows[0]['reward']:.4f} -> {rows[-1]['reward']:.4f}; of held-out prompts: " in last
    assert f"{rows[-1]['eval_reward']:.4f} after step 3" in last
    learning = explain(run_dir).sections[-1].wall_s
    assert learning < min(row["phases_s"]["step"] + row["sample_s"] for row in rows)
    page = (run_dir / "report.html").read_text()
    assert "A round, phase by phase" in page
    assert "Answers by round" in page
    card = (run_dir / "adapter" / "README.md").read_text()
    assert "by reward: rewards, length, 3 rounds of 3 prompts with 4 answers each; mean" in card
    assert run("explain", run_dir) == 0
    assert "sampling took" in capsys.readouterr().out


def test_prompts_are_shown_with_what_rewards_may_read(
    tmp_path: Path,
    write_recipe: RecipeWriter,
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = online(write_recipe, tmp_path)
    assert run("data", recipe, "--html", tmp_path / "data.html") == 0
    page = (tmp_path / "data.html").read_text()
    for said in ("answered 4 times, with at most 6 tokens", "(for rewards)"):
        assert said in page
    assert run("data", recipe, "--json") == 0
    shown = capsys.readouterr().out
    found = json.loads(shown[shown.index("{") :])
    assert [name for name, _ in found["sources"][0]["rows"][0]["columns"]] == ["answer"]
    assert run("data", recipe, f"train.seq_len={found['longest'] + MOST - 1}") == 1
    assert "leave less than objective.max_new_tokens" in capsys.readouterr().err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1", "answer": "2"}) + "\n")
    assert run("init", "--model", model_dir, "--data", prompts, "--yes") != 0
    assert "`objective.method: grpo` with" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "beta": 0.1, "loss": "grpo", "sampling": "fast"}]
)
def test_a_round_is_that_of_plain_transformers_and_autograd(
    settings: dict[str, Any],
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    model_dir: Path,
) -> None:
    """The second round: sampled from, and learned by, what the first one left."""
    recipe = online(write_recipe, tmp_path, objective=settings)
    for steps in (1, 2):
        words = (f"train.steps={steps}", f"output.dir={tmp_path / str(steps)}")
        assert run("finetune", recipe, "--machine", machine_file, *words) == 0
    temperature = settings.get("temperature", 1.0)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "1" / "adapter", is_trainable=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    found, lines = open_round(tmp_path / "2"), round_of(tmp_path / "2", 2)
    assert found["step"] == 1
    answers = [one for several in found["answers"] for one in several]
    rewards = torch.tensor([line["reward"] for line in lines], dtype=torch.float64).view(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    losses_of, num_tokens = [], sum(len(one["tokens"]) for one in answers)
    for number, (line, answer) in enumerate(zip(lines, answers, strict=True)):
        turns = [{"role": "user", "content": line["prompt"]}]
        text: Any = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, enable_thinking=False, tokenize=False
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        ids = torch.tensor([[*prompt, *answer["tokens"]]])

        def logps(ids: torch.Tensor = ids, num: int = len(prompt)) -> torch.Tensor:
            logits = model(input_ids=ids).logits[0, num - 1 : -1].double() / temperature
            return logits.log_softmax(-1)

        all_TV = logps()
        assert drawn(all_TV.detach(), step=1, number=number) == answer["tokens"]
        policy = all_TV.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert torch.allclose(policy, torch.tensor(answer["logprobs"]).double(), atol=1e-5)
        ratio = (policy - policy.detach()).exp()
        with model.disable_adapter(), torch.no_grad():
            reference = logps().gather(1, ids[0, len(prompt) :, None])[:, 0]
        apart = reference - policy
        loss = -ratio * advantages.flatten()[number]
        loss = loss + settings.get("beta", 0.0) * ratio * (apart.exp() - apart - 1)
        is_mean = settings.get("loss") == "grpo"
        losses_of.append(loss.mean() / len(answers) if is_mean else loss.sum() / num_tokens)
    total = torch.stack(losses_of).sum()
    total.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.cat([one.flatten() for one in gradients]).norm()
    row = rows_of(tmp_path / "2")[1]
    assert row["loss"] == pytest.approx(total.item(), abs=1e-6)
    assert norm > 1e-3
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def drawn(logps_TV: torch.Tensor, *, step: int, number: int) -> list[int]:
    """Return the tokens that an answer's own random numbers draw from some distributions."""
    words = b"".join(one.to_bytes(8, "little") for one in (SEED, step, number))
    seed = int.from_bytes(blake2b(words, digest_size=8).digest(), "little") & (2**63 - 1)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for logps_V in logps_TV:
        wanted = torch.rand((), generator=generator, dtype=torch.float64)
        ends = logps_V.exp().cumsum(0)
        found.append(int((ends <= wanted * ends[-1]).sum()))
    return found


SLOW = """
import time
from pathlib import Path


def reward(prompt, answer, row):
    if Path({wait!r}).exists():
        time.sleep(0.1)
    return sum(one.isdigit() for one in answer)
"""


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["sampling", "rewards", "learning"])
def test_a_run_killed_in_any_phase_of_a_round_resumes_to_the_bit(
    phase: str,
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    forked: Forked,
) -> None:
    wait, rewards = tmp_path / "wait", tmp_path / "slow.py"
    rewards.write_text(SLOW.format(wait=str(wait)))
    recipe = online(
        write_recipe,
        tmp_path,
        objective={"rewards": str(rewards), "max_new_tokens": 20},
        adapter={"dropout": 0.2},
        train={"steps": 5, "seq_len": 96},
        output={"checkpoint_every": 2},
    )
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words, f"output.dir={whole}") == 0
    if phase == "rewards":
        wait.touch()
    process = forked.start(*words)

    def is_there() -> bool:
        metrics, file = run_dir / "metrics.jsonl", run_dir / "rounds" / "open.json"
        num = metrics.read_text().count("\n") if metrics.exists() else 0
        step = json.loads(file.read_text())["step"] if file.exists() else -1
        given = file.exists() and json.loads(file.read_text())["given"] is not None
        if phase == "sampling":  # of round 4: that of round 3 is learned from
            return num >= 3 and step == 2
        if phase == "rewards":
            return step == 3 and not given
        return step == 3 and given

    process.wait_for(is_there)
    assert process.end(signal.SIGKILL) == -signal.SIGKILL
    wait.unlink(missing_ok=True)
    assert run(*words, "--resume") == 0
    assert losses(run_dir) == losses(whole)
    assert same_adapter(run_dir, whole)
    for step in range(1, 6):
        assert round_of(run_dir, step) == round_of(whole, step)


BAD = """
def reward(prompt, answer, row):
    if "{mark}" in prompt:
        raise ValueError("no such answer")
    return len(answer)
"""


def test_answers_without_a_reward_are_left_out(
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rewards = tmp_path / "bad.py"
    rewards.write_text(BAD.format(mark="!!!!"))  # of one prompt in five
    recipe = online(write_recipe, tmp_path, objective={"rewards": str(rewards)}, train={"steps": 5})
    assert run("finetune", recipe, "--machine", machine_file) == 0
    failed = [
        [one["prompt"] for one in round_of(tmp_path / "run", step) if one["reward"] is None]
        for step in range(1, 6)
    ]
    assert any(failed)
    assert all("!!!!" in prompt for several in failed for prompt in several)
    assert [row["rewards/left_out"] for row in rows_of(tmp_path / "run")] == list(map(len, failed))
    shown = capsys.readouterr().out
    assert "4 of 12 answers were given no reward: bad.py:reward raised ValueError" in shown


def test_a_round_that_is_given_no_reward_ends_the_run_and_is_kept(
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rewards = tmp_path / "bad.py"
    rewards.write_text(BAD.format(mark="what"))  # of all prompts
    recipe = online(write_recipe, tmp_path, objective={"rewards": str(rewards)})
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 1
    error = capsys.readouterr().err
    assert "12 of 12 answers were given no reward" in error
    assert "ValueError: no such answer" in error
    answers = open_round(tmp_path / "run")["answers"]
    rewards.write_text(BAD.format(mark="nowhere"))
    assert run(*words, "--resume") == 0
    first, *others = rows_of(tmp_path / "run")
    assert first["sample_s"] == 0.0
    assert all(row["sample_s"] for row in others)
    lengths = [one["num_tokens"] for one in round_of(tmp_path / "run", 1)]
    assert lengths == [len(one["tokens"]) for several in answers for one in several]


@pytest.mark.parametrize("changed", ["columns", "functions", "prompts"])
def test_what_a_round_has_found_holds_for_its_prompts_columns_and_functions(
    changed: str,
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the first checkpoint nothing else of a run says which rows it had."""
    rewards, file, run_dir = tmp_path / "of.py", tmp_path / "rows.jsonl", tmp_path / "run"

    def write(word: str, answer: int) -> None:
        rows = [{"question": f"{word} {n}", "answer": str(n + answer)} for n in range(4)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    recipe = online(
        write_recipe,
        tmp_path,
        objective={"rewards": str(rewards)},
        data={"path": str(file), "eval_frac": None},
        train={"steps": 1},
    )
    words = ("finetune", recipe, "--machine", machine_file)
    write("after", 1)
    rewards.write_text("def reward(prompt, answer, row):\n    return float(row['answer'])\n")
    assert run(*words) == 0
    before = open_round(run_dir)
    for folder in (run_dir / "adapter", run_dir / "checkpoints" / "step-0000001"):
        shutil.rmtree(folder)  # as a kill in the first step would have left it
    (run_dir / "metrics.jsonl").unlink()
    if changed == "functions":
        rewards.write_text("def reward(prompt, answer, row):\n    return len(answer)\n")
    else:
        write("after" if changed == "columns" else "again", 5)
    assert run(*words, "--resume") == 0
    is_noted = "The reward functions have changed since round 1" in capsys.readouterr().out
    assert is_noted == (changed == "functions")
    after, (row,) = open_round(run_dir), rows_of(run_dir)
    assert (row["sample_s"] > 0) == (changed == "prompts")
    assert (after["answers"] == before["answers"]) == (changed != "prompts")
    for line in round_of(run_dir, 1):
        number = int(line["prompt"].rpartition(" ")[2])
        wanted = len(line["answer"]) if changed == "functions" else number + 5
        assert line["reward"] == wanted


def test_equal_rewards_teach_nothing_and_are_named(
    tmp_path: Path, write_recipe: RecipeWriter, machine_file: Path
) -> None:
    rewards = tmp_path / "same.py"
    rewards.write_text("def reward(prompt, answer, row):\n    return 1.0\n")
    recipe = online(write_recipe, tmp_path, objective={"rewards": str(rewards)}, train={"steps": 1})
    assert run("finetune", recipe, "--machine", machine_file) == 0
    (row,) = rows_of(tmp_path / "run")
    assert row["frac_reward_zero_std"] == 1.0
    assert row["grad_norm"] == 0.0
    assert adapter(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("train.seq_len=62",), "leave less than objective.max_new_tokens 6 of train.seq_len 62"),
        (("objective.rewards=nowhere.py",), "nowhere.py: No such file"),
        (("objective.rewards=right",), "right is no reward function"),
        (("objective.reference=precomputed", "objective.beta=0.1"), "not known before step 1"),
        (("objective.num_answers=5",), "a multiple of 5"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_the_model_is_loaded(
    changes: tuple[str, ...],
    words: str,
    tmp_path: Path,
    write_recipe: RecipeWriter,
    machine_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = online(write_recipe, tmp_path)
    packing = ("data.packing=off",) if "num_answers" in changes[0] else ()
    assert run("finetune", recipe, "--machine", machine_file, *changes, *packing) != 0
    assert words in " ".join(capsys.readouterr().err.split())
