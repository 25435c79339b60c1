"""Steps of classifiers and reward models against plain transformers and peft in float64."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from finetune.data.step_rows import StepRows
from finetune.recipe.extensions import ObjectiveSection, StepData
from offload.engine.engine import Engine, EngineOptions
from offload.engine.objective import StepLoss
from offload.errors import OffloadError, UnsupportedModelError
from tests.parity.architectures import rel_error
from tests.parity.steps import MODELS, NUM_LAYERS, OPTIONS, assert_equal, gradients, tiny
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
    objective = ObjectiveSection.model_validate({"method": "classify"}).objective(
        StepData(rows=rows, seq_len=40)
    )
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


# ---------------------------------------------------------------------------------- classify tokens


NUM_CLASSES, CLASSIFY_TOKENS_LENGTHS = 4, (5, 9, 12, 7, 6, 11)
CLASSIFY_TOKENS_CUTS = ((6,), (1,) * 6, (3, 1, 2))
Row = tuple[torch.Tensor, torch.Tensor]


def classifier_classify_tokens(name: str) -> Any:
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


def rows_of_step_classify_tokens() -> list[Row]:
    """Return the tokens of each row, and the class of each token, where it has one."""
    rng, rows = torch.Generator().manual_seed(3), []
    for num in CLASSIFY_TOKENS_LENGTHS:
        classes = torch.randint(NUM_CLASSES, (num,), generator=rng)
        classes[torch.rand(num, generator=rng) < 0.4] = -100
        classes[0], classes[-1] = -100, num % NUM_CLASSES
        rows.append((torch.randint(1, 64, (num,), generator=rng), classes))
    return rows


def batches_of_classify_tokens(
    sizes: tuple[int, ...], *, is_packed: bool
) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of so many rows, padded to one width, or packed."""
    rows, batches = iter(rows_of_step_classify_tokens()), []
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


def plain_classify_tokens(model: Any) -> tuple[float, dict[str, torch.Tensor], float]:
    """Return loss, gradients and accuracy by plain transformers and peft."""
    model = copy.deepcopy(model)
    num = sum(int((classes != -100).sum()) for _, classes in rows_of_step_classify_tokens())
    total, hits = 0.0, 0
    for ids, classes in rows_of_step_classify_tokens():
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
def test_reorder_gradients_are_those_of_plain_peft_however_a_step_is_cut_classify_tokens(
    name: str,
) -> None:
    model = classifier_classify_tokens(name)
    loss, truth, accuracy = plain_classify_tokens(model)
    assert sum("score" in n for n in truth) == 2  # weight and bias
    assert all(gradient.abs().max() > 1e-9 for gradient in truth.values())
    all_classes = torch.cat([classes for _, classes in rows_of_step_classify_tokens()])
    rows = StepRows(
        groups_R=torch.arange(len(CLASSIFY_TOKENS_LENGTHS)),
        values_R=torch.zeros(len(CLASSIFY_TOKENS_LENGTHS), dtype=torch.float64),
        num_trained=len(CLASSIFY_TOKENS_LENGTHS),
        classes_N=all_classes[all_classes != -100],
    )
    objective = ObjectiveSection.model_validate({"method": "classify_tokens"}).objective(
        StepData(rows=rows, seq_len=40)
    )
    for sizes, chunk, is_packed in [
        *((s, c, False) for s in CLASSIFY_TOKENS_CUTS for c in (1, 7)),
        ((4, 2), 7, True),
    ]:
        streamed = copy.deepcopy(model)
        options = replace(OPTIONS, head_chunk_tokens=chunk)
        engine = Engine(streamed, device=torch.device("cpu"), options=options)
        result = engine.forward_backward(
            batches_of_classify_tokens(sizes, is_packed=is_packed), objective=objective
        )
        assert result.loss == pytest.approx(loss, rel=1e-11)
        assert result.metrics["accuracy"] == pytest.approx(accuracy)
        found = gradients(streamed)
        assert found.keys() == truth.keys()
        assert rel_error(found, truth) < 1e-11
        engine.detach()


# ------------------------------------------------------------------------------------------- reward


GROUPS, VALUES = (2, 0, 1, 0, 3, 2, 1, 3), (1.5, 0, 1, 1, 0, 0, 0, 1)
CENTER = 0.05
Found = tuple[float, dict[str, torch.Tensor]]


def classifier_reward(name: str) -> Any:
    """Return a tiny classifier with LoRA, on the experts too, and its head trained whole."""
    torch.manual_seed(0)
    config = MODELS[name]().config
    config.num_labels, config.pad_token_id = 1, 0
    config._experts_implementation = "eager"
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    has_experts = hasattr(config, "num_experts")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if has_experts else None
    adapted = get_peft_model(
        model,
        LoraConfig(
            task_type="SEQ_CLS",
            r=4,
            target_modules=["q_proj", "v_proj", "o_proj"],
            target_parameters=experts,
            modules_to_save=["score"],
        ),
    )
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.1)
    return adapted.train()


def batches_of_reward(
    sizes: Sequence[int], *, is_packed: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of so many rows, padded to one width, or packed."""
    rows, batches = iter(rows_of_step()), []
    for size in sizes:
        part = [next(rows) for _ in range(size)]
        marks = [torch.full_like(row, -100) for row in part]
        for row, mark in zip(part, marks, strict=True):
            mark[-1] = row[-1]
        if is_packed:
            batch = {"input_ids": torch.cat(part)[None], "labels": torch.cat(marks)[None]}
            batches.append(batch | {"row_lens": torch.tensor([len(row) for row in part])})
            continue
        pad = nn.utils.rnn.pad_sequence
        ids = pad([*part, torch.zeros(14, dtype=torch.int64)], batch_first=True)[:-1]
        marks.append(torch.full((14,), -100))
        labels = pad(marks, batch_first=True, padding_value=-100)[:-1]
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def plain_reward(model: Any) -> Found:
    model = copy.deepcopy(model).eval()
    rewards = [model(input_ids=row[None]).logits[0, 0] for row in rows_of_step()]
    loss = torch.zeros((), dtype=torch.float64)
    for group in range(4):
        members = [row for row in range(8) if GROUPS[row] == group]
        rejected, chosen = sorted(members, key=lambda row: VALUES[row])
        margin, r = VALUES[chosen] - 1, rewards
        loss = loss + torch.log(1 + torch.exp(-(r[chosen] - r[rejected] - margin))) / 4
        loss = loss + CENTER * (r[chosen] + r[rejected]) ** 2 / 4
    loss.backward()
    return loss.item(), gradients(model)


def steps(
    model: Any,
    cuts: Iterable[Sequence[int]],
    options: EngineOptions = OPTIONS,
    *,
    is_packed: bool = False,
    num_steps: int = 1,
) -> Iterator[Found]:
    """Yield what is found for each way to cut the step; gradients of several steps add up."""
    model = copy.deepcopy(model)
    rows = StepRows(
        groups_R=torch.tensor(GROUPS),
        values_R=torch.tensor(VALUES, dtype=torch.float64),
        num_trained=8,
    )
    section = ObjectiveSection.model_validate({"method": "reward", "beta": CENTER})
    engine = Engine(model, device=torch.device("cpu"), options=options)
    try:
        for sizes in cuts:
            results = [
                engine.forward_backward(
                    batches_of_reward(sizes, is_packed=is_packed),
                    objective=section.objective(StepData(rows=rows, seq_len=40)),
                    dropout_seed=seed,
                )
                for seed in range(num_steps)
            ]
            yield results[-1].loss, gradients(model)
            model.zero_grad()
    finally:
        engine.detach()


def step(
    model: Any, sizes: Sequence[int], options: EngineOptions = OPTIONS, **changes: Any
) -> Found:
    (found,) = steps(model, [sizes], options, **changes)
    return found


FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss")


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(FAMILIES), "qwen3_moe"))
def test_reorder_gradients_are_those_of_a_plain_loop_however_a_step_is_cut(name: str) -> None:
    model = classifier_reward(name).double()
    loss, truth = plain_reward(model)
    assert any("score" in n for n in truth)
    assert all(gradient.abs().max() > 1e-9 for n, gradient in truth.items() if "expert" not in n)
    for chunk in (1, 7):
        for found_loss, found in steps(model, CUTS, replace(OPTIONS, head_chunk_tokens=chunk)):
            assert found_loss == pytest.approx(loss, rel=1e-11)
            assert found.keys() == truth.keys()
            assert rel_error(found, truth) < 1e-11


@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3_moe"], "qwen3_moe"))
def test_reorder_packed_rows_have_the_gradients_of_rows_alone(name: str) -> None:
    model = classifier_reward(name).double()
    loss, truth = plain_reward(model)
    found_loss, found = step(model, (5, 3), is_packed=True)
    assert found_loss == pytest.approx(loss, rel=1e-11)
    assert rel_error(found, truth) < 1e-11


LEVERS = {
    "kept": replace(OPTIONS, num_kept_graphs=2),
    "stashed, kept": replace(OPTIONS, stash="host", num_kept_graphs=2, num_slots=3),
    "nf4": replace(OPTIONS, codec="nf4"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3_moe"], "qwen3_moe"))
@pytest.mark.parametrize("lever", mostly_slow(list(LEVERS), next(iter(LEVERS))))
def test_move_streamed_is_resident(name: str, lever: str) -> None:
    model, options = classifier_reward(name), LEVERS[lever]
    resident = replace(OPTIONS, num_slots=NUM_LAYERS, codec=options.codec)
    expected = step(model, (5, 3), resident, num_steps=2)
    assert_equal(step(model, (5, 3), options, num_steps=2), expected)


@dataclass(frozen=True)
class Second:
    """A loss that reads an output that a reward model does not have."""

    output_index: int = 1
    reference: None = None

    def loss(self, scores: Any) -> StepLoss:
        return StepLoss(value=scores.policy_N.sum(), metrics={})


@pytest.mark.thorough
def test_what_has_no_such_output_is_refused() -> None:
    engine = Engine(classifier_reward("llama"), device=torch.device("cpu"), options=OPTIONS)
    with pytest.raises(UnsupportedModelError, match="has 1 outputs, from 0, and the loss reads 1"):
        engine.forward_backward(batches_of_reward((8,)), objective=Second())
    with pytest.raises(UnsupportedModelError, match="one row of outputs for all tokens of a row"):
        engine.forward_backward(batches_of_reward((8,)))
    engine.detach()
    causal = Engine(tiny("llama"), device=torch.device("cpu"), options=OPTIONS)
    with pytest.raises(UnsupportedModelError, match="returns no outputs for a whole row"):
        causal.evaluate(batches_of_reward((8,)), objective=Second(output_index=0))
    causal.detach()


def test_a_classifier_that_reads_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier_reward("llama")
    base = model.get_base_model()
    own = type(base).forward

    def forward(self: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
        found = own(self, input_ids, **inputs)
        hidden = self.model(input_ids, use_cache=False).last_hidden_state
        found.logits = self.score(hidden).mean(1)
        return found

    monkeypatch.setattr(type(base), "forward", forward)
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    with pytest.raises(UnsupportedModelError, match="from a row's last token"):
        engine.forward_backward(batches_of_reward((8,)), objective=Second(output_index=0))
    engine.detach()


def test_a_row_without_a_label_is_refused() -> None:
    engine = Engine(classifier_reward("llama"), device=torch.device("cpu"), options=OPTIONS)
    (batch,) = batches_of_reward((8,))
    batch["labels"][3] = -100
    with pytest.raises(OffloadError, match="row 3 of micro-batch 0 has no token with a label"):
        engine.forward_backward([batch], objective=Second(output_index=0))
    engine.detach()
