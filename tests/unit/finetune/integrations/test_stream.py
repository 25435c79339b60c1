"""What of a Trainer's batches reaches an engine, and the losses of those that are evaluated."""

from typing import Any

import pytest
import torch

import offload
from finetune.errors import DataError
from finetune.integrations.trainer import StepBatches, evaluated, micro_batch
from tests.parity.steps import tiny

IDS = torch.arange(1, 11).unsqueeze(0)
FLAT: dict[str, Any] = {
    "input_ids": IDS,
    "labels": torch.tensor([[-100, 2, 3, -100, 5, 6, 7, -100, 9, 10]]),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2]]),
    "cu_seq_lens_q": torch.tensor([0, 3, 7, 10], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 3, 7, 10], dtype=torch.int32),
    "max_length_q": 4,
    "max_length_k": 4,
    "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2]]),
}


def test_the_first_of_a_step_is_known_and_the_others_follow_in_order() -> None:
    step = StepBatches(fetched=[{"a": 1}, {"a": 2}, {"a": 3}])
    assert [step.take(one) for one in step.fetched] == [True, False, False]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_batch_that_is_not_the_next_of_its_step_is_refused(taken: int) -> None:
    step = StepBatches(fetched=[{"a": 1}, {"a": 2}, {"a": 3}])
    for one in step.fetched[:taken]:
        step.take(one)
    with pytest.raises(DataError, match="not the next of its step"):
        step.take({"a": taken + 1})  # equal to the next, and another object


def test_boundaries_of_a_flattened_sequence_become_lengths_of_rows() -> None:
    batch = micro_batch(FLAT)
    assert batch.keys() == {"input_ids", "labels", "row_lens"}
    assert batch["row_lens"].tolist() == [3, 4, 3]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"labels": IDS}, "a label at the first token of a row"),
        ({"position_ids": None}, "no `position_ids` that begin at 0 in each row"),
        ({"position_ids": torch.arange(10).unsqueeze(0)}, "no `position_ids` that begin at 0"),
        ({"attention_mask": torch.ones_like(IDS)}, "an `attention_mask`"),
    ],
)
def test_a_flattened_sequence_that_means_something_else_is_refused(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=f"a flattened batch with `cu_seq_lens_q` has {problem}"):
        micro_batch(FLAT | changes)


def test_entries_that_are_none_are_left_out() -> None:
    batch = micro_batch({"input_ids": IDS, "labels": IDS, "attention_mask": None})
    assert batch.keys() == {"input_ids", "labels"}


@pytest.mark.thorough
def test_rows_without_labels_change_no_loss() -> None:
    model = tiny("llama")
    model.eval()
    other = FLAT | {"labels": FLAT["labels"].clone()}
    other["labels"][0, 3:7] = -100  # the second row
    none = FLAT | {"labels": torch.full_like(IDS, -100)}
    with torch.no_grad():
        rows = [model(input_ids=IDS[:, a:b], use_cache=False).logits for a, b in ((0, 3), (7, 10))]
    labels = torch.cat([IDS[0, 1:3], IDS[0, 8:10]])
    logits = torch.cat([rows[0][0, :-1], rows[1][0, :-1]])
    loss = torch.nn.functional.cross_entropy(logits, labels).item()

    engine = offload.attach(model, num_slots=2, device="cpu")
    batches = [micro_batch(one) for one in (other, none, other)]
    found = evaluated(engine, batches, adapter="default")
    engine.detach()
    assert [one.num_label_tokens for one in found.batches] == [4, 0, 4]
    assert found.batches[0].loss == pytest.approx(loss, rel=1e-6)
    assert found.batches[1].loss != found.batches[1].loss, "NaN"
    right = (logits.argmax(-1) == labels).float().mean().item()
    assert found.batches[0].accuracy == pytest.approx(right)


def test_batches_that_have_no_label_at_all_load_nothing() -> None:
    engine = offload.attach(tiny("llama"), num_slots=2, device="cpu")
    none = micro_batch(FLAT | {"labels": torch.full_like(IDS, -100)})
    assert evaluated(engine, [none], adapter="default").num_loads == 0
    engine.detach()
