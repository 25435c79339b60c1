"""Steps of reward models: a sequence classifier's output at the last token of each row.

The loop is peft's model in float64, each row by itself, with transformers' own pooling. Grades:
MOVE is to the bit, REORDER within rounding.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from finetune.objective.factory import objective_of
from finetune.objective.step_rows import StepRows
from finetune.recipe.sections import ObjectiveSection
from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.objective import StepLoss
from offload.errors import OffloadError, UnsupportedModelError
from tests.parity.steps import MODELS, NUM_LAYERS, OPTIONS, assert_equal, gradients, rel_error, tiny
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS, VALUES = (2, 0, 1, 0, 3, 2, 1, 3), (1.5, 0, 1, 1, 0, 0, 0, 1)
LENGTHS = (5, 9, 12, 7, 6, 11, 8, 10)
CENTER = 0.05
CUTS = ((8,), (1,) * 8, (5, 1, 2))
Found = tuple[float, dict[str, torch.Tensor]]


def classifier(name: str) -> Any:
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


def rows_of_step() -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randint(1, 64, (num,), generator=rng) for num in LENGTHS]


def batches_of(sizes: Sequence[int], *, is_packed: bool = False) -> list[dict[str, torch.Tensor]]:
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


def plain(model: Any) -> Found:
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
                    batches_of(sizes, is_packed=is_packed),
                    objective=objective_of(section, rows, seq_len=40),
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
    model = classifier(name).double()
    loss, truth = plain(model)
    assert any("score" in n for n in truth)
    assert all(gradient.abs().max() > 1e-9 for n, gradient in truth.items() if "expert" not in n)
    for chunk in (1, 7):
        for found_loss, found in steps(model, CUTS, replace(OPTIONS, head_chunk_tokens=chunk)):
            assert found_loss == pytest.approx(loss, rel=1e-11)
            assert found.keys() == truth.keys()
            assert rel_error(found, truth) < 1e-11


@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3_moe"], "qwen3_moe"))
def test_reorder_packed_rows_have_the_gradients_of_rows_alone(name: str) -> None:
    model = classifier(name).double()
    loss, truth = plain(model)
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
    model, options = classifier(name), LEVERS[lever]
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
    engine = Engine(classifier("llama"), device=torch.device("cpu"), options=OPTIONS)
    with pytest.raises(UnsupportedModelError, match="has 1 outputs, from 0, and the loss reads 1"):
        engine.forward_backward(batches_of((8,)), objective=Second())
    with pytest.raises(UnsupportedModelError, match="one row of outputs for all tokens of a row"):
        engine.forward_backward(batches_of((8,)))
    engine.detach()
    causal = Engine(tiny("llama"), device=torch.device("cpu"), options=OPTIONS)
    with pytest.raises(UnsupportedModelError, match="returns no outputs for a whole row"):
        causal.evaluate(batches_of((8,)), objective=Second(output_index=0))
    causal.detach()


def test_a_classifier_that_reads_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier("llama")
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
        engine.forward_backward(batches_of((8,)), objective=Second(output_index=0))
    engine.detach()


def test_a_row_without_a_label_is_refused() -> None:
    engine = Engine(classifier("llama"), device=torch.device("cpu"), options=OPTIONS)
    (batch,) = batches_of((8,))
    batch["labels"][3] = -100
    with pytest.raises(OffloadError, match="row 3 of micro-batch 0 has no token with a label"):
        engine.forward_backward([batch], objective=Second(output_index=0))
    engine.detach()
