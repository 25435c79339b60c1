"""Classifiers by the command line: plain peft gives the classes that a run reports."""

import json
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.classifying import NUM_CLASSES, ROWS, classify_recipe, write
from tests.e2e.runs import losses, rows_of, run


@pytest.mark.thorough
def test_plain_peft_gives_the_classes_that_a_run_reports(
    tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    recipe, run_dir = classify_recipe(write_recipe, tmp_path), tmp_path / "run"
    assert run("finetune", recipe, "--machine", machine_file, "train.steps=6") == 0
    stopped = losses(run_dir)
    assert run("finetune", recipe, "--machine", machine_file, "--resume") == 0
    assert losses(run_dir)[:6] == stopped
    last = [row for row in rows_of(run_dir) if "eval_loss" in row][-1]
    assert not {name for name in last if "hits/" in name}

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    base: Any = AutoModelForSequenceClassification.from_pretrained(
        model_dir, num_labels=NUM_CLASSES, dtype=torch.float32
    )
    plain = PeftModel.from_pretrained(base, str(run_dir / "adapter"), is_trainable=True).eval()
    peft_count = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    capsys.readouterr()
    assert run("plan", recipe, "--machine", machine_file, "--json") == 0
    planned = json.loads(capsys.readouterr().out)["model"]
    assert planned["num_adapter_parameters"] + planned["num_module_parameters"] == peft_count
    loss, hits, predicted = 0.0, 0, []
    for row in ROWS[36:]:
        ids = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            output = plain(input_ids=torch.tensor([ids])).logits[0]
        loss += float(torch.logsumexp(output, 0) - output[row["label"]]) / 12
        predicted.append(int(output.argmax()))
        hits += predicted[-1] == row["label"]
    assert last["eval_loss"] == pytest.approx(loss, rel=1e-4)
    assert last["eval_accuracy"] == pytest.approx(hits / 12)
    assert 0 < last["eval_f1"] <= 1
    assert "text-classification" in (run_dir / "adapter" / "README.md").read_text()
    assert run("merge", run_dir, "--out", tmp_path / "merged") == 1
    assert "is not merged" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("sections", "shown"),
    [
        ({"model": {"num_classes": 2}}, "has the class 2, and model.num_classes is 2"),
        ({"model": {"num_classes": None}}, "model.num_classes is null and objective.method"),
        ({"objective": {"method": "sft"}}, "model.num_classes is 3 and objective.method is sft"),
        ({"data": {"too_long": "truncate"}}, "data.too_long is truncate"),
    ],
)
def test_what_does_not_fit_is_refused(
    sections, shown, tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = classify_recipe(write_recipe, tmp_path, **sections)
    assert run("finetune", recipe, "--machine", machine_file) == 1
    assert shown in " ".join(capsys.readouterr().err.split())


def test_a_label_is_the_number_of_a_class(tmp_path, write_recipe, machine_file, capsys) -> None:
    path = write(tmp_path / "words.jsonl", [{"text": "a b", "label": "good"}] * 3)
    recipe = classify_recipe(write_recipe, tmp_path, data={"path": path})
    assert run("finetune", recipe, "--machine", machine_file) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "'label' is \"good\", and classes are numbered from 0" in shown
