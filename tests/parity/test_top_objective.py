"""Steps whose loss reads named tokens at each label, as distillation to a teacher's top ones does.

Grades: MOVE is to the bit, REORDER within rounding of a plain loop in float64.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from offload.engine.bound import EngineOptions
from offload.engine.objective import Reference, Scores, StepLoss
from offload.errors import OffloadError
from tests.parity.objectives import Batches, adapted, alone, attached, pairs
from tests.parity.steps import NUM_LAYERS, OPTIONS, assert_equal, gradients, rel_error, tiny
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, K = 64, 5
Found = tuple[float, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Teacher:
    """K tokens at each label token of a step, and their probabilities; others share the rest."""

    ids_NK: torch.Tensor
    probabilities_NK: torch.Tensor

    @classmethod
    def drawn(cls, batches: Batches) -> "Teacher":
        """Draw what depends on a row alone, so that any cut of a step has the same teacher."""
        ids, probabilities = [], []
        for row in (row for batch in batches for row in alone(batch)):
            generator = torch.Generator().manual_seed(int(row["input_ids"].sum()))
            num = int((row["labels"][0, 1:] != -100).sum())
            logits_NV = 2 * torch.randn(num, VOCABULARY, generator=generator, dtype=torch.float64)
            top = logits_NV.softmax(1).topk(K, dim=1)
            ids.append(top.indices)
            probabilities.append(top.values)
            ids[-1][0, K - 2 :] = -1  # fewer than K at the first label of each row
            probabilities[-1][0, K - 2 :] = 0
        return cls(ids_NK=torch.cat(ids), probabilities_NK=torch.cat(probabilities))

    def loss(
        self, label_N: torch.Tensor, top_NK: torch.Tensor, others_N: torch.Tensor
    ) -> torch.Tensor:
        """Return the KL divergence over K + 1 tokens, and half of a cross-entropy."""
        p_NK, rest_N = self.probabilities_NK, 1 - self.probabilities_NK.sum(1)
        terms_NK = p_NK * (p_NK.clamp(min=1e-300).log() - top_NK)
        kl_N = terms_NK.where(self.ids_NK >= 0, 0.0).sum(1) + rest_N * (rest_N.log() - others_N)
        return (kl_N - 0.5 * label_N).mean()


@dataclass(frozen=True)
class ToTeacher:
    teacher: Teacher
    reference: Reference | None = None

    @property
    def top_ids(self) -> torch.Tensor:
        return self.teacher.ids_NK

    def loss(self, scores: Scores) -> StepLoss:
        assert scores.top_NK is not None
        assert scores.others_N is not None
        found = scores.policy_N.double(), scores.top_NK.double(), scores.others_N.double()
        return StepLoss(value=self.teacher.loss(*found), metrics={})


def step(
    model: nn.Module,
    batches: Batches,
    options: EngineOptions = OPTIONS,
    *,
    reference: Reference | None = None,
    num_steps: int = 1,
) -> Found:
    model = copy.deepcopy(model)
    engine = attached(model, options)
    objective = ToTeacher(Teacher.drawn(batches), reference)
    try:
        results = [
            engine.forward_backward(batches, objective=objective, dropout_seed=seed)
            for seed in range(num_steps)
        ]
        return results[-1].loss, gradients(model)  # type: ignore[arg-type] # as peft's models
    finally:
        engine.detach()


def plain_step(model: Any, batches: Batches) -> Found:
    """Return loss and gradients by autograd over all rows at once, with all logits, in float64."""
    model = copy.deepcopy(model).double().eval()
    model.config._experts_implementation = "eager"
    teacher, parts = Teacher.drawn(batches), list[torch.Tensor]()
    labels = []
    for row in (row for batch in batches for row in alone(batch)):
        logits_TV = model(input_ids=row["input_ids"], use_cache=False).logits[0, :-1]
        is_label = row["labels"][0, 1:] != -100
        parts.append(logits_TV.log_softmax(-1)[is_label])
        labels.append(row["labels"][0, 1:][is_label])
    logps_NV, ids_NK = torch.cat(parts), teacher.ids_NK
    is_named_NV = torch.zeros(logps_NV.shape, dtype=torch.bool)
    for n, ids in enumerate(ids_NK.tolist()):
        is_named_NV[n, [token for token in ids if token >= 0]] = True
    others_N = (logps_NV.exp() * ~is_named_NV).sum(1).log()
    top_NK = logps_NV.gather(1, ids_NK.clamp(min=0))
    loss = teacher.loss(logps_NV.gather(1, torch.cat(labels)[:, None])[:, 0], top_NK, others_N)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", mostly_slow(["llama", "qwen3_moe", "gemma3_text", "gpt_oss"], "qwen3_moe")
)
def test_reorder_gradients_are_those_of_a_plain_loop(name: str) -> None:
    model = adapted(name)
    loss, ours = step(model, pairs(1, 2))
    plain_loss, truth = plain_step(model, pairs(3))
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert rel_error(ours, truth) < 3e-6


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_in_float64_gradients_are_exact_to_the_last_digits(name: str) -> None:
    model: Any = tiny(name).double()
    model.config._experts_implementation = "eager"
    loss, ours = step(model, pairs(1, 2))
    plain_loss, truth = plain_step(model, pairs(3))
    assert loss == pytest.approx(plain_loss, rel=1e-13)
    assert rel_error(ours, truth) < 1e-13


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3_moe"], "qwen3_moe"))
@pytest.mark.parametrize("chunk", mostly_slow([1, 7, 4096], 7))
def test_a_step_is_the_same_however_rows_and_chunks_of_the_head_are_cut(
    name: str, chunk: int
) -> None:
    model = adapted(name)
    loss, expected = step(model, pairs(4))
    for sizes in ((1, 1, 1, 1), (3, 1), (2, 2)):
        found_loss, found = step(model, pairs(*sizes), replace(OPTIONS, head_chunk_tokens=chunk))
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert rel_error(found, expected) < 1e-6


LEVERS = {
    "kept": replace(OPTIONS, num_kept_graphs=2),
    "stashed, kept": replace(OPTIONS, stash="host", num_kept_graphs=2, num_slots=3),
    "nf4": replace(OPTIONS, codec="nf4"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["qwen3_moe", "gemma3_text"], "qwen3_moe"))
@pytest.mark.parametrize("lever", mostly_slow(list(LEVERS), next(iter(LEVERS))))
def test_move_streamed_is_resident(name: str, lever: str) -> None:
    model, options = adapted(name), LEVERS[lever]
    resident = replace(OPTIONS, num_slots=NUM_LAYERS, codec=options.codec)
    expected = step(model, pairs(1, 2), resident, num_steps=2)
    assert_equal(step(model, pairs(1, 2), options, num_steps=2), expected)


@pytest.mark.thorough
def test_a_reference_is_scored_by_its_labels_alone_and_changes_nothing() -> None:
    model = adapted("llama")
    assert_equal(step(model, pairs(1, 2), reference=Reference()), step(model, pairs(1, 2)))


@pytest.mark.thorough
@pytest.mark.parametrize("num_micro_batches", mostly_slow([1, 4, 8], 4))
def test_it_has_the_loads_of_plain_fine_tuning(num_micro_batches: int) -> None:
    engine = attached(tiny("llama"), replace(OPTIONS, num_slots=3))
    batches = pairs(*(1,) * num_micro_batches)
    engine.forward_backward(batches)  # from now on the ring is warm
    plain = engine.forward_backward(batches)
    found = engine.forward_backward(batches, objective=ToTeacher(Teacher.drawn(batches)))
    engine.detach()
    assert found.num_loads == plain.num_loads == 2 * (NUM_LAYERS - 3)
    assert found.h2d_bytes == plain.h2d_bytes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda ids: ids[1:], r"is \(\d+, 5\) of torch.int64"),
        (lambda ids: ids.int(), r"of torch.int32"),
        (lambda ids: ids.where(ids != ids[3, 1], ids[3, 0]), "with a token twice at label 3"),
        (lambda ids: ids.where(ids != ids[0, 0], -1), "without a token at some label"),
        (lambda ids: ids + VOCABULARY, "with the token 126, and the model predicts 64"),
    ],
)
def test_tokens_that_do_not_fit_the_labels_are_refused(change: Any, found: str) -> None:
    engine = attached(copy.deepcopy(adapted("llama")))
    teacher = Teacher.drawn(pairs(1))
    wrong = ToTeacher(replace(teacher, ids_NK=change(teacher.ids_NK)))
    try:
        with pytest.raises(OffloadError, match=found):
            engine.forward_backward(pairs(1), objective=wrong)
    finally:
        engine.detach()
