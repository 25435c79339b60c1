"""Steps of token classifiers against plain transformers and peft in float64, each row by itself."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForTokenClassification

from finetune.objective.factory import objective_of
from finetune.objective.step_rows import StepRows
from finetune.recipe.sections import ObjectiveSection
from offload.engine.engine import Engine
from tests.parity.steps import MODELS, OPTIONS, gradients, rel_error
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_CLASSES, LENGTHS = 4, (5, 9, 12, 7, 6, 11)
CUTS = ((6,), (1,) * 6, (3, 1, 2))
Row = tuple[torch.Tensor, torch.Tensor]


def classifier(name: str) -> Any:
    torch.manual_seed(0)
    config = MODELS[name]().config
    config.num_labels, config.classifier_dropout = NUM_CLASSES, 0.0
    config._experts_implementation = "eager"
    model: Any = AutoModelForTokenClassification.from_config(config)
    nn.init.normal_(model.score.bias)
    adapted = get_peft_model(
        model,
        LoraConfig(task_type="TOKEN_CLS", r=4, target_modules=["q_proj", "o_proj"]),
    )
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.1)
    return adapted.double().train()


def rows_of_step() -> list[Row]:
    """Return the tokens of each row, and the class of each token, where it has one."""
    rng, rows = torch.Generator().manual_seed(3), []
    for num in LENGTHS:
        classes = torch.randint(NUM_CLASSES, (num,), generator=rng)
        classes[torch.rand(num, generator=rng) < 0.4] = -100
        classes[0], classes[-1] = -100, num % NUM_CLASSES
        rows.append((torch.randint(1, 64, (num,), generator=rng), classes))
    return rows


def batches_of(sizes: tuple[int, ...], *, is_packed: bool) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of so many rows, padded to one width, or packed."""
    rows, batches = iter(rows_of_step()), []
    pad = nn.utils.rnn.pad_sequence
    for size in sizes:
        ids, labels = zip(*(next(rows) for _ in range(size)), strict=True)
        if is_packed:
            batch = {"input_ids": torch.cat(ids)[None], "labels": torch.cat(labels)[None]}
            batches.append(batch | {"row_lens": torch.tensor([len(row) for row in ids])})
            continue
        filled = pad(list(labels), batch_first=True, padding_value=-100)
        batches.append({"input_ids": pad(list(ids), batch_first=True), "labels": filled})
    return batches


def plain(model: Any) -> tuple[float, dict[str, torch.Tensor], float]:
    """Return loss, gradients and accuracy by plain transformers and peft."""
    model = copy.deepcopy(model)
    num = sum(int((classes != -100).sum()) for _, classes in rows_of_step())
    total, hits = 0.0, 0
    for ids, classes in rows_of_step():
        found = model(input_ids=ids[None], labels=classes[None])
        own = nn.functional.cross_entropy(found.logits[0], classes, reduction="sum")
        num_own = int((classes != -100).sum())
        assert found.loss.item() == pytest.approx(own.item() / num_own, rel=1e-6)  # it is in fp32
        share = own / num
        share.backward()
        total += share.item()
        hits += int((found.logits[0].argmax(1) == classes).sum())
    return total, gradients(model), hits / num


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3", "qwen3_moe"], "qwen3_moe"))
def test_reorder_gradients_are_those_of_plain_peft_however_a_step_is_cut(name: str) -> None:
    model = classifier(name)
    loss, truth, accuracy = plain(model)
    assert sum("score" in n for n in truth) == 2  # weight and bias
    assert all(gradient.abs().max() > 1e-9 for gradient in truth.values())
    all_classes = torch.cat([classes for _, classes in rows_of_step()])
    rows = StepRows(
        groups_R=torch.arange(len(LENGTHS)),
        values_R=torch.zeros(len(LENGTHS), dtype=torch.float64),
        num_trained=len(LENGTHS),
        classes_N=all_classes[all_classes != -100],
    )
    objective = objective_of(ObjectiveSection(method="classify_tokens"), rows, seq_len=40)
    for sizes, chunk, is_packed in [
        *((s, c, False) for s in CUTS for c in (1, 7)),
        ((4, 2), 7, True),
    ]:
        streamed = copy.deepcopy(model)
        options = replace(OPTIONS, head_chunk_tokens=chunk)
        engine = Engine(streamed, device=torch.device("cpu"), options=options)
        result = engine.forward_backward(
            batches_of(sizes, is_packed=is_packed), objective=objective
        )
        assert result.loss == pytest.approx(loss, rel=1e-11)
        assert result.metrics["accuracy"] == pytest.approx(accuracy)
        found = gradients(streamed)
        assert found.keys() == truth.keys()
        assert rel_error(found, truth) < 1e-11
        engine.detach()
