"""Losses of preferences against TRL's own code, on the same log-probabilities of the same rows.

    python -m tests.bench.bench_preferences        (pip install trl==1.16.0)

TRL's `_compute_loss` runs as it is, in float64, with a model that returns drawn logits, for one
micro-batch that is a whole step. Printed are the largest differences of the loss, of its gradient
by each label token's log-probability, and of each metric that both have, relative to the larger
of 1 and TRL's own.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from finetune.data.step_rows import StepRows
from finetune.recipe.extensions import ObjectiveSection, StepData
from offload.engine.objective import Scores
from tests.objectives import losses_of

NUM_PAIRS, PROMPT, LONGEST, VOCABULARY = 6, 3, 12, 23
Found = tuple[torch.Tensor, torch.Tensor, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Padded rows (B, T), and what two models give for them; positions are those of TRL."""

    input_ids: torch.Tensor
    completion_mask: torch.Tensor
    logits: torch.Tensor
    reference_logits: torch.Tensor

    @property
    def label_mask(self) -> torch.Tensor:
        return self.completion_mask[:, 1:].bool()

    def logps(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probability of each next token (B, T - 1), 0 where it has no label."""
        all_logps = logits[:, :-1].log_softmax(-1)
        found = all_logps.gather(-1, self.input_ids[:, 1:, None])[..., 0]
        return found * self.label_mask

    def __getitem__(self, part: slice) -> "Rows":
        return Rows(
            input_ids=self.input_ids[part],
            completion_mask=self.completion_mask[part],
            logits=self.logits[part],
            reference_logits=self.reference_logits[part],
        )


def drawn(num_rows: int, *, seed: int, prompt: int = PROMPT, lead: float = 0.0) -> Rows:
    """Draw rows of different lengths, and a policy near a reference.

    Args:
        num_rows: How many.
        seed: What they are drawn from.
        prompt: Tokens before each answer.
        lead: By how much the policy's logits of the tokens that are there are raised.
    """
    rng = torch.Generator().manual_seed(seed)
    shape = (num_rows, prompt + LONGEST)
    lengths = torch.randint(2, LONGEST + 1, (num_rows, 1), generator=rng)
    positions = torch.arange(shape[1])
    reference = torch.randn(*shape, VOCABULARY, generator=rng, dtype=torch.float64)
    drift = torch.randn(*shape, VOCABULARY, generator=rng, dtype=torch.float64)
    input_ids = torch.randint(1, VOCABULARY, shape, generator=rng)
    following = nn.functional.one_hot(input_ids.roll(-1, 1), VOCABULARY)
    return Rows(
        input_ids=input_ids,
        completion_mask=((positions >= prompt) & (positions < prompt + lengths)).long(),
        logits=reference + 0.3 * drift + lead * following,
        reference_logits=reference,
    )


# ------------------------------------------------------------------------------- ours


def ours(values: Mapping[str, Any], rows: Rows, known: StepRows) -> Found:
    """Return our loss of a step, its gradient (B, T - 1), and metrics."""
    section = ObjectiveSection.model_validate(values)
    is_label = rows.label_mask
    policy_N = rows.logps(rows.logits)[is_label].requires_grad_()
    scores = Scores(
        policy_N=policy_N,
        reference_N=rows.logps(rows.reference_logits)[is_label],
        rows_N=is_label.nonzero()[:, 0],
        num_rows=len(is_label),
    )
    result = section.objective(StepData(rows=known, seq_len=LONGEST)).loss(scores)
    (gradient_N,) = torch.autograd.grad(result.value, policy_N)
    gradient = torch.zeros(is_label.shape, dtype=torch.float64)
    gradient[is_label] = gradient_N
    return result.value.detach(), gradient, {k: v.item() for k, v in result.metrics.items()}


# ------------------------------------------------------------------------------- TRL's


class Model(nn.Module):
    """Returns logits and log-probabilities that are known, by the tokens that it is given."""

    is_gradient_checkpointing = False

    def __init__(self, known: Mapping[int, Rows], logps: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._known, self._logps = known, logps

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        rows, logps = self._known[id(input_ids)], self._logps[id(input_ids)]
        none = torch.zeros_like(logps)
        return SimpleNamespace(
            log_probs=logps,
            entropy=none,
            mean_logits=none,
            is_top1=none.bool(),
            logits=rows.logits,
            aux_loss=None,
        )


def trainer(**attributes: object) -> SimpleNamespace:
    """Return what TRL's `_compute_loss` reads of a trainer."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        sync_gradients=True,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
        unwrap_model=lambda model: model,
        autocast=nullcontext,
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=nn.Identity(),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        **attributes,
    )


def metrics_of(stub: SimpleNamespace) -> dict[str, float]:
    return {name: float(values[-1]) for name, values in stub._metrics["train"].items()}


def trl_dpo(values: Mapping[str, Any], rows: Rows) -> Found:
    """TRL's DPO: the first half of the rows are chosen answers, the second rejected ones."""
    from trl.trainer.dpo_trainer import DPOTrainer

    logps = rows.logps(rows.logits).requires_grad_()
    key = id(rows.input_ids)
    weight = values.get("sft_weight", 0.0)
    stub = trainer(
        ref_model=Model({key: rows}, {key: rows.logps(rows.reference_logits)}),
        ld_alpha=None,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
        f_divergence_type="reverse_kl",
        loss_types=[values["loss"], *(["sft"] if weight else [])],
        loss_weights=[1.0, *([weight] if weight else [])],
        beta=values["beta"],
        label_smoothing=values.get("label_smoothing", 0.0),
        use_weighting=False,
    )
    stub.model.is_gradient_checkpointing = False
    batch = {
        "input_ids": rows.input_ids,
        "attention_mask": torch.ones_like(rows.input_ids),
        "completion_mask": rows.completion_mask,
    }
    loss = DPOTrainer._compute_loss(stub, Model({key: rows}, {key: logps}), batch, False)
    return loss.detach(), torch.autograd.grad(loss, logps)[0], metrics_of(stub)


def trl_cpo(values: Mapping[str, Any], rows: Rows) -> Found:
    """TRL's CPO, SimPO or ORPO, from logits."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    kind = ORPOTrainer if values["method"] == "orpo" else CPOTrainer
    logps = rows.logps(rows.logits).requires_grad_()
    stub = trainer(
        loss_type="simpo" if values["method"] == "simpo" else values.get("loss", "sigmoid"),
        alpha=0.0,
        beta=values["beta"],
        label_smoothing=values.get("label_smoothing", 0.0),
        simpo_gamma=values.get("gamma", 0.0),
        cpo_alpha=values.get("sft_weight", 0.0),
        is_encoder_decoder=False,
        pad_token_id=0,
        padding_value=0,
        concatenated_inputs=kind.concatenated_inputs,
        get_batch_logps=kind.get_batch_logps,
    )
    name = "odds_ratio_loss" if kind is ORPOTrainer else "cpo_loss"
    setattr(stub, name, functools.partial(getattr(kind, name), stub))
    stub.concatenated_forward = functools.partial(kind.concatenated_forward, stub)
    half = len(rows.input_ids) // 2
    labels = rows.input_ids.masked_fill(rows.completion_mask == 0, -100)
    # What follows an answer is padding: it is no part of the loss that ORPO takes on whole rows.
    is_row = rows.completion_mask.flip(1).cumsum(1).flip(1) > 0
    batch = {
        f"{name}_{key}": value[part]
        for name, part in (("chosen", slice(half)), ("rejected", slice(half, None)))
        for key, value in (
            ("input_ids", rows.input_ids),
            ("attention_mask", is_row.long()),
            ("labels", labels),
        )
    }
    # Logits of which the label's log-probability is a given one, with a gradient by it alone.
    logits = rows.logits.log_softmax(-1).clone()
    at = rows.label_mask.nonzero()
    logits = LabelLogits.apply(logits, logps, rows.input_ids, at)
    model = lambda *_, **__: SimpleNamespace(logits=logits)  # noqa: E731
    loss, metrics = kind.get_batch_loss_metrics(stub, model, batch)
    return loss.detach(), torch.autograd.grad(loss, logps)[0], metrics


class LabelLogits(torch.autograd.Function):
    """Logits as they are; the gradient by a label's log-probability is minus that by the others.

    With log-probabilities as logits, d loss / d logit_j = g (1[j is the label] - p_j), where g is
    the gradient by the label's log-probability, so g is that of another entry over minus its p.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, logps: torch.Tensor, *rest: torch.Tensor) -> Any:
        ctx.save_for_backward(logits, *rest)
        ctx.shape = logps.shape
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, input_ids, at = ctx.saved_tensors
        found = torch.zeros(ctx.shape, dtype=logits.dtype)
        for row, position in at.tolist():
            other = 0 if input_ids[row, position + 1] else 1
            p = logits[row, position, other].exp()
            found[row, position] = -gradient[row, position, other] / p
        return None, found, None, None


def trl_kto(values: Mapping[str, Any], rows: Rows, labels: torch.Tensor) -> Found:
    """TRL's KTO: the second half of the rows are the mismatched ones."""
    from trl.trainer.kto_trainer import KTOTrainer

    half = len(rows.input_ids) // 2
    parts = [rows[:half], rows[half:]]
    batch = {
        "input_ids": parts[0].input_ids,
        "attention_mask": torch.ones_like(parts[0].input_ids),
        "completion_mask": parts[0].completion_mask,
        "KL_input_ids": parts[1].input_ids,
        "KL_attention_mask": torch.ones_like(parts[1].input_ids),
        "KL_completion_mask": parts[1].completion_mask,
        "label": labels.bool(),
    }
    known = {id(batch["input_ids"]): parts[0], id(batch["KL_input_ids"]): parts[1]}
    policy = {key: part.logps(part.logits) for key, part in known.items()}
    logps = policy[id(batch["input_ids"])].requires_grad_()
    reference = {key: part.logps(part.reference_logits) for key, part in known.items()}
    stub = trainer(
        ref_model=Model(known, reference),
        calculate_KL=values["loss"] == "kto",
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        loss_type=values["loss"],
        beta=values["beta"],
        desirable_weight=values["desirable_weight"],
        undesirable_weight=values["undesirable_weight"],
    )
    stub.model.is_gradient_checkpointing = False
    stub._compute_kl_logps = functools.partial(KTOTrainer._compute_kl_logps, stub)
    loss = KTOTrainer._compute_loss(stub, Model(known, policy), batch, False)
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), torch.cat((gradient, torch.zeros_like(gradient))), metrics_of(stub)


def trl_grpo(
    values: Mapping[str, Any], rows: Rows, rewards: torch.Tensor, sampler: torch.Tensor
) -> Found:
    """TRL's GRPO or RLOO; groups are of three answers, one after the other."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer
    from trl.trainer.utils import nanstd

    logps = rows.logps(rows.logits).requires_grad_()
    reference, mask = rows.logps(rows.reference_logits), rows.label_mask.double()
    is_rloo = values["loss"] == "rloo"
    old = sampler if values["importance_sampling_mode"] == "ratio" else logps.detach()
    if is_rloo:
        rewards = rewards - values["beta"] * (logps.detach() - reference).sum(1)
    grouped = rewards.view(-1, 3)
    if is_rloo:
        advantages = rewards - ((grouped.sum(1, keepdim=True) - grouped) / 2).view(-1)
    else:
        advantages = (grouped - grouped.mean(1, keepdim=True)).view(-1)
        if values["loss"] != "dr_grpo":  # `scale_rewards: none` there
            advantages = advantages / (nanstd(grouped, dim=1).repeat_interleave(3) + 1e-4)
    # A completion's padding has labels that are masked out, so rows are as wide as the longest.
    empty = torch.zeros(len(mask), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": rows.input_ids[:, 1:],
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": reference,
        "old_per_token_logps": old,
        "old_logps": old.sum(1),
    }
    mode = values["importance_sampling_mode"]
    if mode not in ("none", "ratio"):
        apart = (logps.detach() - sampler) * mask
        ratio = (apart.sum(1, keepdim=True) if mode.startswith("sequence") else apart).exp()
        inputs["importance_sampling_ratio"] = (
            ratio.clamp(max=3.0) if mode.endswith("truncate") else ratio * (ratio <= 3.0)
        )
    high = values["clip_epsilon_high"]
    stub = trainer(
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=values["beta"],
        loss_type=values["loss"],
        epsilon_low=values["clip_epsilon"],
        epsilon_high=high,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=True, steps_per_generation=1),
        use_vllm=True,
        vllm_importance_sampling_correction="importance_sampling_ratio" in inputs,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros_like(mask), None),
    )
    loss = (RLOOTrainer if is_rloo else GRPOTrainer)._compute_loss(stub, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, logps)[0], metrics_of(stub)


def distilled(name: str, rows: Rows) -> tuple[Found, Found]:
    """Return our distillation and TRL's to the reference's 5 likeliest tokens, by all logits."""
    from trl.experimental.server_distillation import server_distillation_trainer as trl

    is_label = rows.label_mask
    teacher = rows.reference_logits[:, :-1][is_label].log_softmax(-1).topk(5, dim=1)
    logits_NV = rows.logits[:, :-1][is_label].requires_grad_()
    logps_NV = logits_NV.log_softmax(-1)
    top_NK = logps_NV.gather(1, teacher.indices)
    is_named_NV = torch.zeros_like(logps_NV).scatter(1, teacher.indices, 1).bool()
    known = StepRows(
        groups_R=torch.arange(len(is_label)),
        values_R=torch.ones(len(is_label)),
        num_trained=len(is_label),
        top_ids_NK=teacher.indices,
        top_logps_NK=teacher.values,
    )
    section = ObjectiveSection.model_validate({"method": "distill", "loss": name})
    own = section.objective(StepData(rows=known, seq_len=LONGEST)).loss(
        Scores(
            policy_N=rows.logps(rows.logits)[is_label],
            reference_N=None,
            rows_N=is_label.nonzero()[:, 0],
            num_rows=len(is_label),
            top_NK=top_NK,
            others_N=logps_NV.masked_fill(is_named_NV, -torch.inf).logsumexp(1),
        )
    )
    student, likeliest = top_NK, teacher.values
    mask = torch.ones_like(student, dtype=torch.bool)
    if name == "kl":
        student, wide = trl._add_tail_bucket(student, mask)
        likeliest, mask = trl._add_tail_bucket(likeliest, mask)[0], wide
    else:
        student, likeliest = (x - x.logsumexp(-1, keepdim=True) for x in (student, likeliest))
    theirs = trl._jsd_divergence(student, likeliest, 0.0, mask).sum() / len(top_NK)

    def found(loss: torch.Tensor) -> Found:
        (gradient,) = torch.autograd.grad(loss, logits_NV, retain_graph=True)
        return loss.detach(), gradient, {}

    return found(own.value), found(theirs)


# ------------------------------------------------------------------------------- the table


def pair_cases() -> list[dict[str, Any]]:
    """Settings of every loss of pairs that TRL has too."""
    smoothed = {"sigmoid": 0.0, "robust": 0.1, "exo_pair": 0.1, "aot": 0.1, "aot_unpaired": 0.1}
    return [
        {"method": "dpo", "loss": loss, "beta": 0.3, "sft_weight": weight}
        | ({"label_smoothing": smoothed[loss]} if loss in smoothed else {})
        for loss in losses_of("dpo")
        if loss != "plackett_luce"
        for weight in ((0.0, 0.5) if loss == "sigmoid" else (0.0,))
    ] + [
        {"method": "simpo", "beta": 2.0, "gamma": 0.5, "label_smoothing": 0.1, "sft_weight": 0.5},
        {
            "method": "cpo",
            "loss": "sigmoid",
            "beta": 0.1,
            "label_smoothing": 0.1,
            "sft_weight": 1.0,
        },
        {"method": "cpo", "loss": "hinge", "beta": 0.1, "sft_weight": 0.0},
        {"method": "cpo", "loss": "ipo", "beta": 0.1, "sft_weight": 1.0},
        {"method": "orpo", "beta": 0.1},
    ]


def compare(table: Table, name: str, rows: Rows, own: Found, theirs: Found) -> None:
    """Add a row of differences; TRL sums padding too, whose log-probability is 0."""

    def apart(a: float, b: float) -> float:
        return abs(a - b) / max(1.0, abs(b))

    both = sorted(own[2].keys() & theirs[2].keys())
    worst = max(((apart(own[2][key], theirs[2][key]), key) for key in both), default=(0.0, ""))
    of_labels = (
        theirs[1] * rows.label_mask if theirs[1].shape == rows.label_mask.shape else theirs[1]
    )
    gradient = (own[1] - of_labels).abs().max().item() / max(1.0, of_labels.abs().max().item())
    loss = apart(own[0].item(), theirs[0].item())
    shown = f"{worst[0]:.1e} of {len(both)}" + (f" ({worst[1]})" if worst[0] > 1e-9 else "")
    table.add_row(name, f"{own[0].item():.6f}", f"{loss:.1e}", f"{gradient:.1e}", shown)


def main() -> None:
    """Print the table."""
    table = Table("loss", "value", "difference", "of gradients", "of metrics")
    pairs = StepRows(
        groups_R=torch.arange(NUM_PAIRS).repeat(2),
        values_R=torch.tensor([1.0, 0.0]).repeat_interleave(NUM_PAIRS),
        num_trained=2 * NUM_PAIRS,
    )
    for seed, values in enumerate(pair_cases()):
        of_pairs: Callable[..., Found] = trl_dpo if values["method"] == "dpo" else trl_cpo
        prompt = 1 if values["method"] == "orpo" else PROMPT
        rows = drawn(2 * NUM_PAIRS, seed=seed, prompt=prompt)
        name = f"{values['method']} {values.get('loss', '')}" + (
            f", sft_weight {values['sft_weight']}" if values.get("sft_weight") else ""
        )
        compare(table, name, rows, ours(values, rows, pairs), of_pairs(values, rows))
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    singles = StepRows(
        groups_R=torch.arange(6).repeat(2),
        values_R=torch.cat((labels, torch.zeros(6))),
        num_trained=6,
    )
    for seed, (loss, lead) in enumerate((("kto", 0.0), ("kto", 0.3), ("apo_zero_unpaired", 0.3))):
        values = {"method": "kto", "loss": loss, "beta": 0.3}
        values |= {"desirable_weight": 1.2, "undesirable_weight": 0.7}
        rows = drawn(12, seed=seed, lead=lead)
        own = ours(values, rows, singles)
        compare(
            table,
            f"kto {loss}, kl {own[2].get('kl', 0):.3f}",
            rows,
            own,
            trl_kto(values, rows, labels),
        )
    rows = drawn(12, seed=9)
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(rows.label_mask.shape, generator=torch.Generator().manual_seed(2))
    sampler = (rows.logps(rows.logits) + 0.3 * noise) * rows.label_mask
    for loss in losses_of("grpo"):
        for mode in ("none", "ratio", "token_truncate", "sequence_mask"):
            if loss == "rloo" and mode not in ("none", "ratio"):
                continue  # TRL's corrects for no sampler
            values = {"method": "grpo", "loss": loss, "beta": 0.05, "clip_epsilon": 0.2}
            values |= {"clip_epsilon_high": 0.28, "importance_sampling_mode": mode}
            sampled = StepRows(
                groups_R=torch.arange(4).repeat_interleave(3),
                values_R=rewards,
                num_trained=12,
                sampler_N=None if mode == "none" else sampler[rows.label_mask],
            )
            own = ours(values, rows, sampled)
            compare(
                table, f"grpo {loss}, {mode}", rows, own, trl_grpo(values, rows, rewards, sampler)
            )
    for name in losses_of("distill"):
        rows = drawn(12, seed=11)
        compare(table, f"distill {name}", rows, *distilled(name, rows))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
