"""Every loss that a recipe offers, on whole models: loss and all gradients against a plain loop.

The loop is peft's model in float64, each row by itself, `disable_adapter` for the reference, and
the formulas of the papers. The same step is then cut into micro-batches in other ways. REORDER: in
float64 what is left is rounding.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from finetune.objective.factory import objective_of
from finetune.objective.step_rows import StepRows
from finetune.recipe.sections import LOSSES, ObjectiveSection
from offload.engine.engine import Engine
from tests.parity import formulas as by_hand
from tests.parity.formulas import Answer, Loss
from tests.parity.steps import OPTIONS, gradients, rel_error, tiny
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, SEQ_LEN = 14, 40
PAIRED = ((2, 0, 1, 0, 3, 2, 1, 3), (1, 0, 1, 1, 0, 0, 0, 1))
RANKED = ((0, 1, 0, 1, 1, 0, 1, 1), (3, 2, 1, 5, 4, 2, 1, 3))
LABELLED = ((0, 1, 2, 3, 4, 5, 6, 7), (1, 0, 0, 1, 1, 0, 1, 0))
SAMPLED = ((0, 1, 0, 1, 1, 0, 1, 1), (0.5, 1, 0, 0.25, -1, 2, 0, 1))
CUTS = ((8,), (1,) * 8, (5, 1, 2))
METHODS = ("dpo", "simpo", "cpo", "orpo", "kto", "grpo")  # those that compare answers


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of a recipe, and the same loss by hand."""

    settings: Mapping[str, Any]
    by_hand: Loss
    groups: tuple[tuple[int, ...], tuple[float, ...]] = PAIRED


def dpo(loss: str, formula: Loss, **settings: Any) -> Case:
    return Case(settings={"method": "dpo", "loss": loss, "beta": 0.4} | settings, by_hand=formula)


def grpo(loss: str, **settings: Any) -> Case:
    formula = partial(by_hand.grpo, loss, limit=3.0, longest=SEQ_LEN)
    names = {
        "beta": "b",
        "importance_sampling_mode": "mode",
        "clip_epsilon_high": "high",
    }
    return Case(
        settings={"method": "grpo", "loss": loss} | settings,
        by_hand=formula(**{names[name]: value for name, value in settings.items()}),
        groups=SAMPLED,
    )


def kto(loss: str, *, has_kl: bool) -> Case:
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.5}
    return Case(
        settings={"method": "kto", "loss": loss, "beta": 0.4} | weights,
        by_hand=by_hand.kto(0.4, 1.0, 1.5, has_kl=has_kl),
        groups=LABELLED,
    )


of_d, of_mean = by_hand.of_difference, by_hand.of_mean_difference
CASES = {
    "dpo sigmoid": dpo("sigmoid", of_d(by_hand.cdpo(0.4, 0.0))),
    "dpo sigmoid, smoothed": dpo(
        "sigmoid", of_d(by_hand.cdpo(0.4, 0.1), sft_weight=0.5), label_smoothing=0.1, sft_weight=0.5
    ),
    "dpo hinge": dpo("hinge", of_d(lambda d: torch.clamp(1 - 0.4 * d, min=0))),
    "dpo ipo": dpo("ipo", of_mean(lambda d: (d - 1 / 0.8) ** 2)),
    "dpo robust": dpo("robust", of_d(by_hand.robust(0.4, 0.2)), label_smoothing=0.2),
    "dpo sigmoid_norm": dpo("sigmoid_norm", of_mean(by_hand.cdpo(0.4, 0.0))),
    "dpo exo_pair": dpo("exo_pair", of_d(by_hand.exo(0.4, 1e-3))),
    "dpo nca_pair": dpo("nca_pair", by_hand.nca(0.4)),
    "dpo bco_pair": dpo("bco_pair", by_hand.bco(0.4)),
    "dpo sppo_hard": dpo("sppo_hard", by_hand.sppo(0.4)),
    "dpo aot": dpo("aot", by_hand.aot(0.4, 0.1, is_paired=True), label_smoothing=0.1),
    "dpo aot_unpaired": dpo("aot_unpaired", by_hand.aot(0.4, 0.0, is_paired=False)),
    "dpo apo_zero": dpo("apo_zero", by_hand.apo_zero(0.4)),
    "dpo apo_down": dpo("apo_down", by_hand.apo_down(0.4)),
    "dpo discopop": dpo("discopop", of_d(by_hand.discopop(0.4, 0.05))),
    "dpo plackett_luce": Case(
        settings={"method": "dpo", "loss": "plackett_luce", "beta": 0.4},
        by_hand=by_hand.plackett_luce(0.4),
        groups=RANKED,
    ),
    "simpo": Case(settings={"method": "simpo"}, by_hand=by_hand.simpo(2.0, 0.5)),
    "simpo, cross-entropy": Case(
        settings={"method": "simpo", "sft_weight": 0.3, "gamma": 1.0},
        by_hand=by_hand.simpo(2.0, 1.0, sft_weight=0.3),
    ),
    "cpo sigmoid": Case(
        settings={"method": "cpo", "loss": "sigmoid"}, by_hand=by_hand.cpo(by_hand.cdpo(0.1, 0.0))
    ),
    "cpo hinge": Case(
        settings={"method": "cpo", "loss": "hinge"},
        by_hand=by_hand.cpo(lambda d: torch.clamp(1 - 0.1 * d, min=0)),
    ),
    "cpo ipo": Case(
        settings={"method": "cpo", "loss": "ipo"},
        by_hand=by_hand.cpo(lambda d: (d - 5.0) ** 2, is_mean=True),
    ),
    "orpo": Case(settings={"method": "orpo"}, by_hand=by_hand.orpo(0.1)),
    "kto": kto("kto", has_kl=True),
    "kto apo_zero_unpaired": kto("apo_zero_unpaired", has_kl=False),
    "grpo dapo": grpo("dapo", beta=0.1, importance_sampling_mode="ratio", clip_epsilon_high=0.3),
    "grpo dapo, no reference": grpo("dapo"),
    "grpo grpo": grpo("grpo", beta=0.1, importance_sampling_mode="token_truncate"),
    "grpo grpo, masked": grpo("grpo", importance_sampling_mode="token_mask"),
    "grpo dr_grpo": grpo("dr_grpo", importance_sampling_mode="sequence_truncate"),
    "grpo dr_grpo, masked": grpo("dr_grpo", beta=0.1, importance_sampling_mode="sequence_mask"),
    "grpo rloo": grpo("rloo", beta=0.05, importance_sampling_mode="ratio"),
    "grpo rloo, masked": grpo("rloo", beta=0.05, importance_sampling_mode="sequence_mask"),
}


def test_every_loss_that_compares_answers_has_a_case() -> None:
    sections = [ObjectiveSection.model_validate(case.settings) for case in CASES.values()]
    offered = {(method, loss) for method in METHODS for loss in LOSSES.get(method, (None,))}
    assert {(section.method, section.loss) for section in sections} == offered


# ------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, kw_only=True)
class Row:
    """Tokens, those of the prompt without a label, and what is known of each labelled one."""

    ids: list[int]
    num_prompt: int
    sampler: list[float]

    @property
    def answer(self) -> list[int]:
        return self.ids[self.num_prompt :]


def rows_of_step() -> list[Row]:
    rng = torch.Generator().manual_seed(3)
    rows = []
    for number in range(8):
        num_prompt, num = 2 + number % 3, 3 + (5 * number) % 7
        ids = torch.randint(0, 64, (num_prompt + num,), generator=rng).tolist()
        drawn = (-4.2 + 1.6 * (torch.rand(num, generator=rng) - 0.5)).tolist()
        rows.append(Row(ids=ids, num_prompt=num_prompt, sampler=drawn))
    return rows


def mismatched(rows: Sequence[Row]) -> list[Row]:
    return [
        Row(
            ids=row.ids[: row.num_prompt] + rows[number - 1].answer,
            num_prompt=row.num_prompt,
            sampler=[],
        )
        for number, row in enumerate(rows)
    ]


def batches_of(rows: Sequence[Row], sizes: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of so many rows, padded to one width."""
    ids = torch.zeros(len(rows), WIDTH, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        labels[number, row.num_prompt : len(row.ids)] = torch.tensor(row.answer)
        mask[number, : len(row.ids)] = 1
    parts = zip(*(x.split(list(sizes)) for x in (ids, labels, mask)), strict=True)
    return [dict(zip(("input_ids", "labels", "attention_mask"), p, strict=True)) for p in parts]


# ------------------------------------------------------------------------------------ both computed


def logps(model: Any, row: Row) -> torch.Tensor:
    """Return the log-probability of each token of an answer, by its prompt."""
    logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0]
    return torch.stack(
        [
            logits[place - 1, row.ids[place]] - logits[place - 1].exp().sum().log()
            for place in range(row.num_prompt, len(row.ids))
        ]
    )


def plain(model: Any, case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model).eval()
    rows, (groups, values) = rows_of_step(), case.groups
    answers = []
    for number, row in enumerate([*rows, *mismatched(rows)]):
        is_scored = number >= len(rows)
        with torch.no_grad(), model.disable_adapter():
            reference = logps(model, row)
        with torch.set_grad_enabled(not is_scored):
            policy = logps(model, row)
        answer = Answer(
            policy=policy,
            reference=reference,
            sampler=torch.tensor(row.sampler, dtype=torch.float32).double(),
            group=groups[number % len(rows)],
            value=values[number % len(rows)],
            is_scored=is_scored,
        )
        answers.append(answer)
    if case.settings["method"] != "kto":
        answers = answers[: len(rows)]
    loss = case.by_hand(answers)
    loss.backward()
    return loss.item(), gradients(model)


def streamed(
    model: Any, case: Case, cuts: Iterable[Sequence[int]]
) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Yield the step's loss and gradients for each way to cut it."""
    model = copy.deepcopy(model)
    rows, (groups, values) = rows_of_step(), case.groups
    section = ObjectiveSection.model_validate(case.settings)
    scored = mismatched(rows) if section.scores_mismatched else []
    times = 2 if scored else 1
    step_rows = StepRows(
        groups_R=torch.tensor(groups * times),
        values_R=torch.tensor(values * times, dtype=torch.float64),
        num_trained=len(rows),
        sampler_N=torch.tensor([x for row in rows for x in row.sampler])
        if section.takes_sampler
        else None,
    )
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    try:
        for sizes in cuts:
            result = engine.forward_backward(
                batches_of(rows, sizes),
                objective=objective_of(section, step_rows, seq_len=SEQ_LEN),
                scored=batches_of(scored, sizes[::-1]) if scored else (),
                dropout_seed=0,
            )
            yield result.loss, gradients(model)
            model.zero_grad()
    finally:
        engine.detach()


FAST = ("dpo sigmoid", "dpo aot", "simpo", "cpo sigmoid", "orpo", "kto", "grpo dapo")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "of"),
    mostly_slow(
        [(name, of) for of in CASES for name in ("llama", "qwen3_moe")],
        *((("llama", "qwen3_moe")[number % 2], of) for number, of in enumerate(FAST)),
    ),
)
def test_reorder_each_loss_has_the_gradients_of_a_plain_loop_however_it_is_cut(
    name: str, of: str
) -> None:
    model = tiny(name).double()
    model.config._experts_implementation = "eager"
    loss, truth = plain(model, CASES[of])
    assert any(gradient.abs().max() > 1e-4 for gradient in truth.values())
    for found_loss, found in streamed(model, CASES[of], CUTS):
        assert found_loss == pytest.approx(loss, rel=1e-11)
        assert found.keys() == truth.keys()
        assert rel_error(found, truth) < 1e-11
