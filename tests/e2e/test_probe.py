"""A probe and the run that follows it against plain torch, transformers and peft."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tests.e2e.classifying import (
    NUM_CLASSES,
    NUM_TRAINED,
    ROWS,
    TAGGED_ROWS,
    classify_recipe,
    ids_and_places,
    tagging_recipe,
)
from tests.e2e.forked import Forked
from tests.e2e.plain_heads import Plain, cosine, steps_of
from tests.e2e.rewarding import PAIRS, WEIGHT, reward_recipe
from tests.e2e.runs import adapter, losses, rows_of, run
from tests.e2e.sweeps import states

LR, PROBE_LR, SEED = 0.01, 0.05, 3
NUM_PROBE_STEPS, NUM_STEPS = 6, 3
TRAIN = {
    # all rows in each step, so that their order does not matter
    **{"micro_batch_size": 4, "grad_accum_steps": 9, "lr": LR, "steps": NUM_STEPS, "seed": SEED},
    **{"probe_steps": NUM_PROBE_STEPS, "probe_lr": PROBE_LR},
}
ADAPTER = {"experts": False, "rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


def probe_recipe(
    write_recipe: Any, tmp_path: Path, make: Callable[..., Path] = classify_recipe, **train: Any
) -> Path:
    return make(
        write_recipe,
        tmp_path,
        adapter=ADAPTER,
        train=TRAIN | train,
        data={"packing": "off"},
        output={"eval_every": NUM_PROBE_STEPS},
    )


def probe_rows(run_dir: Path) -> list[dict[str, Any]]:
    from finetune.run.probe_folder import read_steps

    return read_steps(run_dir)


@pytest.mark.thorough
def test_reorder_both_phases_are_those_of_plain_torch_and_peft(
    tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    recipe, run_dir = probe_recipe(write_recipe, tmp_path), tmp_path / "run"
    assert run("finetune", recipe, "--machine", machine_file) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "96 trained" in shown
    assert "48 features once" in shown
    assert f"{NUM_PROBE_STEPS} steps of the head (96 weights)" in shown

    assert_reported(run_dir, capsys)

    plain, held_out = (Plain.of(model_dir, rows, seed=SEED) for rows in (ROWS[:36], ROWS[36:]))
    features, head = plain.features(), plain.model.score.weight
    expected = steps_of(
        [head], lambda: functional.linear(features, head), plain.labels, PROBE_LR, NUM_PROBE_STEPS
    )
    ours = probe_rows(run_dir)
    assert [row["loss"] for row in ours] == pytest.approx([one for one, _ in expected], rel=1e-5)
    assert [row["accuracy"] for row in ours] == pytest.approx([one for _, one in expected])
    assert ours[-1]["loss"] < 0.9 * ours[0]["loss"]
    (name, found), *others = load_file(run_dir / "probe" / "head.safetensors").items()
    assert not others
    assert name.endswith("score.modules_to_save.default.weight")
    torch.testing.assert_close(found, head.data, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        outputs = functional.linear(held_out.features(), head)
    assert ours[-1]["eval_loss"] == pytest.approx(
        functional.cross_entropy(outputs, held_out.labels).item(), rel=1e-5
    )

    torch.manual_seed(SEED)
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["score"],
    )
    adapted = get_peft_model(plain.model, config)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    expected = steps_of(trained, lambda: plain.logits(adapted), plain.labels, LR, NUM_STEPS)
    assert losses(run_dir) == pytest.approx([one for one, _ in expected], rel=2e-5)
    base = Plain.of(model_dir, ROWS[:36], seed=SEED)
    loaded = PeftModel.from_pretrained(base.model, str(run_dir / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            base.logits(loaded), plain.logits(adapted.eval()), rtol=1e-3, atol=1e-4
        )


def assert_reported(run_dir: Path, capsys: Any) -> None:
    """The page, the card and the explanation say what the probe was."""
    last = probe_rows(run_dir)[-1]
    learned = f"-> {last['loss']:.4f}, accuracy"
    page = (run_dir / "report.html").read_text()
    assert "head of the probe" in page
    assert learned in page.replace("&gt;", ">")
    card = (run_dir / "adapter" / "README.md").read_text()
    assert f"| steps of the head alone, before | {NUM_PROBE_STEPS} |" in card
    assert learned in card
    assert json.loads((run_dir / "report.json").read_text())["probe"]["last"] == last
    assert run("explain", run_dir) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Probe: 48 features in" in shown
    assert f"Its head: loss {probe_rows(run_dir)[0]['loss']:.4f} {learned}" in shown


@pytest.mark.slow
def test_reorder_a_head_of_rewards_learns_as_in_plain_torch(
    tmp_path, model_dir, write_recipe, machine_file
) -> None:
    recipe = reward_recipe(
        write_recipe,
        tmp_path,
        model_dir,
        adapter=ADAPTER,
        train=TRAIN | {"grad_accum_steps": 16},
        output={"eval_every": NUM_PROBE_STEPS},
    )
    assert run("finetune", recipe, "--machine", machine_file) == 0
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        model_dir, num_labels=1, dtype=torch.float32
    )
    head = model.score.weight
    torch.manual_seed(SEED)
    torch.nn.init.normal_(head, std=model.config.initializer_range)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def features(answer: str) -> torch.Tensor:
        found = []
        for pair in PAIRS[:-4]:
            turns = [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair[answer]},
            ]
            ids: Any = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
            ids = torch.tensor([ids[: len(ids) - ids[::-1].index(end)]])
            with torch.no_grad():
                found.append(model.model(input_ids=ids).last_hidden_state[0, -1])
        return torch.stack(found)

    chosen, rejected = features("chosen"), features("rejected")
    optimizer = torch.optim.AdamW([head], weight_decay=0.0)
    expected = []
    for step in range(NUM_PROBE_STEPS):
        better, worse = chosen @ head[0], rejected @ head[0]
        loss = -functional.logsigmoid(better - worse).mean()
        loss = loss + WEIGHT * (better + worse).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([head], 1.0)
        optimizer.param_groups[0]["lr"] = PROBE_LR * cosine(step, NUM_PROBE_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    ours = probe_rows(tmp_path / "run")
    assert [row["loss"] for row in ours] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.99 * expected[0]
    assert rows_of(tmp_path / "run")[-1]["step"] == NUM_STEPS


@pytest.mark.slow
def test_quant_features_of_a_model_in_bf16_are_its_own_and_the_head_learns_in_fp32(
    tmp_path, model_dir, write_recipe
) -> None:
    recipe = probe_recipe(write_recipe, tmp_path)
    assert run("finetune", recipe, "model.dtype=bfloat16") == 0
    plain = Plain.of(model_dir, ROWS[:36], seed=SEED)
    exact, rounded = plain.features(), plain.model.bfloat16().model
    with torch.no_grad():
        states = [rounded(input_ids=one).last_hidden_state[:, -1] for one in plain.ids]
    features = torch.cat(states).float()
    apart = (features - exact).norm() / exact.norm()
    assert 1e-3 < apart < 0.05  # what bf16 rounds
    torch.manual_seed(SEED)
    drawn = torch.nn.init.normal_(
        plain.model.score.weight, std=plain.model.config.initializer_range
    )
    head = torch.nn.Parameter(drawn.detach().float())
    expected = steps_of(
        [head], lambda: functional.linear(features, head), plain.labels, PROBE_LR, NUM_PROBE_STEPS
    )
    ours = probe_rows(tmp_path / "run")
    assert [row["loss"] for row in ours] == pytest.approx([one for one, _ in expected], rel=2e-3)
    (found,) = load_file(tmp_path / "run" / "probe" / "head.safetensors").values()
    assert found.dtype == torch.float32
    assert (found - head.data).norm() < 0.05 * head.data.norm()


@pytest.mark.slow
def test_move_a_run_killed_in_its_probe_or_after_it_ends_as_one_that_was_not(
    tmp_path, write_recipe, machine_file, forked: Forked
) -> None:
    recipe = probe_recipe(write_recipe, tmp_path, probe_steps=300)
    words = ("finetune", recipe, "--machine", machine_file)
    whole, run_dir = tmp_path / "whole", tmp_path / "killed"
    assert forked.start(*words, f"output.dir={whole}").end() == 0
    process = forked.start(*words, f"output.dir={run_dir}")
    process.wait_until(lambda: "Before training" in process.shown)
    assert process.end(9) == -9
    assert not (run_dir / "probe").exists()
    process = forked.start(*words, f"output.dir={run_dir}", "--resume")
    process.wait_until((run_dir / "probe").exists)
    assert process.end(9) == -9
    process = forked.start(*words, f"output.dir={run_dir}", "--resume")
    assert process.end() == 0
    assert "The head is that of the probe" in " ".join(process.shown.split())
    assert [row["loss"] for row in probe_rows(run_dir)] == [
        row["loss"] for row in probe_rows(whole)
    ]
    assert_same_bits(run_dir, whole)


@pytest.mark.thorough
def test_move_a_run_resumed_after_its_probe_begins_with_its_head(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe, run_dir = probe_recipe(write_recipe, tmp_path), tmp_path / "run"
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 0
    whole = tmp_path / "whole"
    shutil.copytree(run_dir, whole)
    for folder in (
        "adapter",
        *(f"checkpoints/{one.name}" for one in run_dir.glob("checkpoints/*")),
    ):
        shutil.rmtree(run_dir / folder)
    (run_dir / "metrics.jsonl").unlink()
    capsys.readouterr()
    assert run(*words, "--resume") == 0
    assert "The head is that of the probe" in " ".join(capsys.readouterr().out.split())
    assert_same_bits(run_dir, whole)


@pytest.mark.slow
def test_reorder_a_head_of_words_learns_as_in_plain_torch(
    tmp_path, model_dir, write_recipe, machine_file
) -> None:
    recipe = probe_recipe(write_recipe, tmp_path, tagging_recipe)
    assert run("finetune", recipe, "--machine", machine_file) == 0
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForTokenClassification.from_pretrained(
        model_dir, num_labels=NUM_CLASSES, dtype=torch.float32
    )
    head = model.score
    torch.manual_seed(SEED)
    torch.nn.init.normal_(head.weight, std=model.config.initializer_range)
    torch.nn.init.zeros_(head.bias)
    features, labels = [], []
    for row in TAGGED_ROWS[:NUM_TRAINED]:
        ids, firsts = ids_and_places(tokenizer, row)
        with torch.no_grad():
            states = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        for place, label in zip(firsts, row["ner_tags"], strict=True):
            if label != -100:
                features.append(states[place])
                labels.append(label)
    values = torch.stack(features)
    expected = steps_of(
        [head.weight, head.bias],
        lambda: functional.linear(values, head.weight, head.bias),
        torch.tensor(labels),
        PROBE_LR,
        NUM_PROBE_STEPS,
    )
    ours = probe_rows(tmp_path / "run")
    assert [row["loss"] for row in ours] == pytest.approx([one for one, _ in expected], rel=1e-5)
    assert [row["accuracy"] for row in ours] == pytest.approx([one for _, one in expected])


@pytest.mark.slow
def test_move_each_run_of_a_sweep_has_its_own_probe_or_none(
    tmp_path, write_recipe, machine_file
) -> None:
    recipe = probe_recipe(write_recipe, tmp_path, probe_lr=None, probe_steps=None)
    words = ("--machine", machine_file)
    folder = tmp_path / "run"
    assert run("sweep", recipe, *words, f"train.probe_steps=null,{NUM_PROBE_STEPS}") == 0
    without, having = (folder / name for name in states(folder))
    assert not (without / "probe").exists()
    alone = tmp_path / "alone"
    setting = f"train.probe_steps={NUM_PROBE_STEPS}"
    assert run("finetune", recipe, *words, setting, f"output.dir={alone}") == 0
    found, expected = (load_file(one / "probe" / "head.safetensors") for one in (having, alone))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_same_bits(having, alone)
    assert losses(without)[0] != losses(having)[0]


def assert_same_bits(run_dir: Path, whole: Path) -> None:
    assert losses(run_dir) == losses(whole)
    assert [row.get("eval_loss") for row in rows_of(run_dir)] == [
        row.get("eval_loss") for row in rows_of(whole)
    ]
    ours, theirs = adapter(run_dir), adapter(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
