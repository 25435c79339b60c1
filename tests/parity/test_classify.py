"""Steps of classifiers against peft's model in float64, each row by itself."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification

from finetune.objective.factory import objective_of
from finetune.objective.step_rows import StepRows
from finetune.recipe.sections import ObjectiveSection
from offload.engine.engine import Engine
from tests.parity.steps import MODELS, OPTIONS, gradients, rel_error
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = (2, 0, 1, 0, 3, 2, 1, 3)
LENGTHS = (5, 9, 12, 7, 6, 11, 8, 10)
CUTS = ((8,), (1,) * 8, (5, 1, 2))


def classifier(name: str) -> Any:
    torch.manual_seed(0)
    config = MODELS[name]().config
    config.num_labels, config.pad_token_id = 4, 0
    config._experts_implementation = "eager"
    model: Any = AutoModelForSequenceClassification.from_config(config)
    adapted = get_peft_model(
        model,
        LoraConfig(
            task_type="SEQ_CLS", r=4, target_modules=["q_proj", "o_proj"], modules_to_save=["score"]
        ),
    )
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.1)
    return adapted.double().train()


def rows_of_step() -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randint(1, 64, (num,), generator=rng) for num in LENGTHS]


def batches_of(sizes: tuple[int, ...], *, is_packed: bool) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of so many rows, padded to one width, or packed."""
    rows, batches = iter(rows_of_step()), []
    pad = nn.utils.rnn.pad_sequence
    for size in sizes:
        part = [next(rows) for _ in range(size)]
        marks = [torch.full_like(row, -100) for row in part]
        for row, mark in zip(part, marks, strict=True):
            mark[-1] = row[-1]
        if is_packed:
            batch = {"input_ids": torch.cat(part)[None], "labels": torch.cat(marks)[None]}
            batches.append(batch | {"row_lens": torch.tensor([len(row) for row in part])})
            continue
        ids = pad(part, batch_first=True)
        labels = pad(marks, batch_first=True, padding_value=-100)
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def plain(model: Any) -> tuple[float, dict[str, torch.Tensor], float]:
    """Return loss, gradients and accuracy by plain peft."""
    model = copy.deepcopy(model).eval()
    outputs = torch.cat([model(input_ids=row[None]).logits for row in rows_of_step()])
    loss = torch.zeros((), dtype=torch.float64)
    for row, own in zip(outputs, CLASSES, strict=True):
        loss = loss + (torch.logsumexp(row, 0) - row[own]) / len(LENGTHS)
    loss.backward()
    hits = (outputs.argmax(1) == torch.tensor(CLASSES)).sum()
    return loss.item(), gradients(model), float(hits) / len(LENGTHS)


@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3", "qwen3_moe"], "qwen3_moe"))
def test_reorder_gradients_are_those_of_plain_peft_however_a_step_is_cut(name: str) -> None:
    model = classifier(name)
    loss, truth, accuracy = plain(model)
    assert sum("score" in n for n in truth) == 1
    assert all(gradient.abs().max() > 1e-9 for gradient in truth.values())
    values = torch.tensor(CLASSES, dtype=torch.float64)
    rows = StepRows(groups_R=torch.arange(8), values_R=values, num_trained=8)
    objective = objective_of(ObjectiveSection(method="classify"), rows, seq_len=40)
    plain_cuts = [(sizes, False) for sizes in CUTS]
    for chunk, cuts in ((1, plain_cuts), (7, [*plain_cuts, ((5, 3), True)])):
        streamed = copy.deepcopy(model)
        options = replace(OPTIONS, head_chunk_tokens=chunk)
        engine = Engine(streamed, device=torch.device("cpu"), options=options)
        for sizes, is_packed in cuts:
            result = engine.forward_backward(
                batches_of(sizes, is_packed=is_packed), objective=objective
            )
            assert result.loss == pytest.approx(loss, rel=1e-11)
            assert result.metrics["accuracy"] == accuracy
            found = gradients(streamed)
            assert found.keys() == truth.keys()
            assert rel_error(found, truth) < 1e-11
            streamed.zero_grad()
        engine.detach()
