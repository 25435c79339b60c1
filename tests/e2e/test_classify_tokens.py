"""Classes of words by the command line: plain peft gives those that a run reports."""

import json
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForTokenClassification, AutoTokenizer

from tests.e2e.classifying import (
    NUM_CLASSES,
    NUM_TRAINED,
    TAGGED_ROWS,
    ids_and_places,
    tagging_recipe,
    write,
)
from tests.e2e.runs import losses, rows_of, run


def macro_f1(pairs: list[tuple[int, int]]) -> float:
    """Return the mean over classes of 2 hits / (predicted + labelled)."""
    scores = []
    for one in {value for pair in pairs for value in pair}:
        hits = sum(label == one == found for label, found in pairs)
        both = sum(label == one for label, _ in pairs) + sum(found == one for _, found in pairs)
        scores.append(2 * hits / both)
    return sum(scores) / len(scores)


@pytest.mark.thorough
def test_plain_peft_gives_the_classes_of_words_that_a_run_reports(
    tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    recipe, run_dir = tagging_recipe(write_recipe, tmp_path), tmp_path / "run"
    assert run("finetune", recipe, "--machine", machine_file, "train.steps=6") == 0
    stopped = losses(run_dir)
    assert run("finetune", recipe, "--machine", machine_file, "--resume") == 0
    assert losses(run_dir)[:6] == stopped
    last = [row for row in rows_of(run_dir) if "eval_loss" in row][-1]

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    base: Any = AutoModelForTokenClassification.from_pretrained(
        model_dir, num_labels=NUM_CLASSES, dtype=torch.float32
    )
    plain = PeftModel.from_pretrained(base, str(run_dir / "adapter"), is_trainable=True).eval()
    peft_count = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    capsys.readouterr()
    assert run("plan", recipe, "--machine", machine_file, "--json") == 0
    planned = json.loads(capsys.readouterr().out)["model"]
    assert planned["num_adapter_parameters"] + planned["num_module_parameters"] == peft_count
    total, pairs = 0.0, []
    for row in TAGGED_ROWS[NUM_TRAINED:]:
        ids, firsts = ids_and_places(tokenizer, row)
        with torch.no_grad():
            outputs = plain(input_ids=torch.tensor([ids])).logits[0]
        for place, label in zip(firsts, row["ner_tags"], strict=True):
            if label != -100:
                total += float(torch.logsumexp(outputs[place], 0) - outputs[place, label])
                pairs.append((label, int(outputs[place].argmax())))
    assert last["eval_loss"] == pytest.approx(total / len(pairs), rel=1e-4)
    assert last["eval_accuracy"] == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    assert last["eval_f1"] == pytest.approx(macro_f1(pairs))
    assert last["eval_f1"] > 0.5
    assert "token-classification" in (run_dir / "adapter" / "README.md").read_text()
    assert run("merge", run_dir, "--out", tmp_path / "merged") == 1
    assert "AutoModelForTokenClassification" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"tokens": ["a", "b"], "ner_tags": [0]}, "'tokens' has 2 words, 'ner_tags' 1 classes"),
        ({"tokens": ["a", " "], "ner_tags": [0, 1]}, "'tokens' has \" \", and no word"),
        ({"tokens": ["a"], "ner_tags": ["B-PER"]}, "'ner_tags' has \"B-PER\", and classes are"),
        ({"tokens": ["a"], "ner_tags": [-100]}, "'ner_tags' has no class"),
        ({"tokens": ["a"], "ner_tags": [3]}, "has the class 3, and model.num_classes is 3"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    row, shown, tmp_path, write_recipe, machine_file, capsys
) -> None:
    path = write(tmp_path / "bad.jsonl", [row] * 3)
    recipe = tagging_recipe(write_recipe, tmp_path, data={"path": path})
    assert run("finetune", recipe, "--machine", machine_file) == 1
    assert shown in " ".join(capsys.readouterr().err.split())
