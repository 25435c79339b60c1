"""Full training, and training in 16 bits, against plain PyTorch, written without the engine."""

import copy
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from bitsandbytes.optim.lion import Lion
from peft import PeftModel
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import offload
from finetune.adapter import lora as adapters
from finetune.data.steps import StepShare
from finetune.full.weights import choose_weights
from finetune.recipe.adapters import LoraSection
from finetune.recipe.sections import TrainSection
from finetune.run.checkpoint import LossScale
from finetune.training.full.update import FullUpdate
from finetune.training.loop import Loop
from finetune.training.optimizer import AdapterUpdate
from finetune.training.ranks import Ranks
from offload.engine.engine import Engine, EngineOptions
from offload.engine.objective import Scores, StepLoss
from offload.engine.passes.part import RunStep
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.schedule import Reduced
from tests.doubles import HookedDevice
from tests.parity.architectures import SLACK
from tests.parity.steps import (
    MODELS,
    NUM_LAYERS,
    OPTIONS,
    SHAPE,
    gradients,
    micro_batches,
    plain,
    tiny,
)
from tests.rehearsals import rehearse
from tests.tiers import mostly_slow

Batch = dict[str, torch.Tensor]
LR, MAX_NORM = 3e-3, 0.25  # the norm of these gradients is larger in each step
NUM_MICRO_BATCHES = 3


def model_of(name: str = "qwen3") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


def wider_model() -> nn.Module:
    """Return a model whose matrices are large enough for states in 8 bits."""
    torch.manual_seed(0)
    shape = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    return Qwen3ForCausalLM(Qwen3Config(**shape)).train()


def step_of(number: int) -> list[Batch]:
    """Rows of a simple language (each token is a function of the last), so that a loss can fall."""
    generator = torch.Generator().manual_seed(number)
    batches = []
    for width in (9, 12, 15):
        ids = torch.randint(0, 64, (2, width), generator=generator)
        for place in range(1, width):
            ids[:, place] = (5 * ids[:, place - 1] + 3) % 64
        labels = ids.clone()
        labels[:, :2] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def num_labels(batches: Sequence[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def share_of(batches: Sequence[Batch]) -> StepShare:
    return StepShare(
        micro_batches=tuple(batches),
        micro_batch_ids=tuple(range(len(batches))),
        num_tokens=num_labels(batches),
        num_label_tokens=num_labels(batches),
    )


def loop_of(
    model: nn.Module,
    *,
    max_norm: float | None = MAX_NORM,
    optimizer: str = "adamw",
    lr: float = LR,
    **options: Any,
) -> Loop:
    train = TrainSection(
        what="all",
        grad_accum_steps=NUM_MICRO_BATCHES,
        steps=1000,
        optimizer=optimizer,
        lr=lr,
        schedule="constant",
        max_grad_norm=max_norm,
        weight_decay=0.0,
    )
    engine = attached(model, **options)
    return Loop(
        model=model,
        engine=engine,
        update=FullUpdate(engine, train=train),
        train=train,
        num_steps=1000,
        ranks=Ranks(),
    )


def attached(model: nn.Module, **options: Any) -> Engine:
    """Return an engine of a model whose weights train on the host."""
    options = {"num_slots": 2, **options, "trained_weights": "host"}
    return offload.attach(model, device="cpu", head_chunk_tokens=7, **options)


def engine_of(loop: Loop) -> Engine:
    assert isinstance(loop.engine, Engine)
    return loop.engine


def run(loop: Loop, numbers: Sequence[int]) -> list[float]:
    return [loop.step(number, share_of(step_of(number))).loss for number in numbers]


def values_of(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.weights.items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------ full training


def plain_gradients(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Add a step's gradients to `.grad` of a plain model, and return its loss."""
    total, loss = num_labels(batches), 0.0
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        summed = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        (summed / total).backward()
        loss += summed.item() / total
    return loss


def plain_losses(
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer],
    num_steps: int,
    *,
    is_reversed: bool = False,
) -> list[float]:
    optimizer, losses = make(model.parameters()), []
    for number in range(num_steps):
        batches = step_of(number)
        losses.append(plain_gradients(model, batches[::-1] if is_reversed else batches))
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "qwen3"))
def test_reorder_gradients_at_the_weights_of_plain_pytorch(name: str) -> None:
    """Before each step our weights are set to those of the reference, whose clipping is active."""
    reference, ours = model_of(name), model_of(name)
    engine = offload.attach(
        ours, num_slots=2, device="cpu", trained_weights="host", head_chunk_tokens=7
    )
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, fused=True, weight_decay=0.0)
    for number in range(3):
        masters = engine.trained_parameters
        with torch.no_grad():
            for n, parameter in reference.named_parameters():
                masters[n].copy_(parameter)
        plain_gradients(reference, step_of(number))
        engine.forward_backward(step_of(number))
        assert masters.keys() == {n for n, _ in reference.named_parameters()}
        squared = difference = 0.0
        for n, parameter in reference.named_parameters():
            ours_grad, plain_grad = masters[n].grad, parameter.grad
            assert ours_grad is not None
            assert plain_grad is not None
            difference += float((ours_grad.double() - plain_grad.double()).norm()) ** 2
            squared += float(plain_grad.double().norm()) ** 2
            masters[n].grad = None
        assert difference**0.5 <= 1e-6 * squared**0.5
        assert nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM) > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()


@pytest.mark.parametrize(
    ("what", "is_chosen"),
    [
        (["biases"], lambda name: name.endswith("bias")),
        (["norms"], lambda name: "norm" in name),
        (["last_2_layers"], lambda name: ".layers.2." in name or ".layers.3." in name),
        (["model.layers.3.mlp.*", "lm_head.*"], lambda name: "3.mlp" in name or "lm_head" in name),
    ],
    ids=["biases", "norms", "layers", "patterns"],
)
def test_reorder_gradients_of_selected_weights_are_those_of_plain_pytorch(
    what: list[str], is_chosen: Callable[[str], bool]
) -> None:
    torch.manual_seed(0)
    reference = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).train()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.requires_grad = is_chosen(name)
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    ours = copy.deepcopy(reference)
    choose_weights(ours, what)
    plain_gradients(reference, step_of(0))
    engine = offload.attach(
        ours, num_slots=2, device="cpu", trained_weights="host", head_chunk_tokens=7
    )
    engine.forward_backward(step_of(0))
    found, expected = engine.trained_parameters, dict(reference.named_parameters())
    assert found.keys() == {name for name in expected if is_chosen(name)}
    squared = difference = 0.0
    for name, parameter in found.items():
        ours_grad, plain_grad = parameter.grad, expected[name].grad
        assert ours_grad is not None
        assert plain_grad is not None
        assert plain_grad.norm() > 0, name
        difference += float((ours_grad.double() - plain_grad.double()).norm()) ** 2
        squared += float(plain_grad.double().norm()) ** 2
    assert difference**0.5 <= 1e-6 * squared**0.5
    engine.detach()


def test_reorder_the_norm_is_that_of_plain_pytorch() -> None:
    reference, loop = model_of(), loop_of(model_of())
    plain_gradients(reference, step_of(0))
    norm = float(nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM))
    record = loop.step(0, share_of(step_of(0)))
    assert record.grad_norm == pytest.approx(norm, rel=1e-6)
    assert norm > MAX_NORM


def furthest(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "num_steps",
    [
        20,
        pytest.param(100, marks=pytest.mark.slow),
        pytest.param(300, marks=pytest.mark.exhaustive),
    ],
)
def test_reorder_losses_are_as_close_as_those_of_pytorchs_own_adamws(num_steps: int) -> None:
    """PyTorch has two of them, and adds up the micro-batches of a step in either order.

    Six layers, for with fewer two orders of PyTorch's may differ by less than a rounding.
    """

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"num_hidden_layers": 6})).train()

    def adamw(parameters: Any, *, is_fused: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, fused=is_fused, foreach=False)

    plain = [
        plain_losses(made(), partial(adamw, is_fused=is_fused), num_steps, is_reversed=reverse)
        for is_fused in (True, False)
        for reverse in (False, True)
    ]
    ours = run(loop_of(made()), range(num_steps))
    apart = max(furthest(a, b) for a, b in itertools.combinations(plain, 2))
    assert apart > 0
    assert max(furthest(ours, one) for one in plain) <= 2 * apart
    if num_steps == 300:
        assert ours[-1] < 0.5 * ours[0]


@pytest.mark.parametrize(
    ("name", "library", "lr", "apart"),
    mostly_slow(
        [
            ("lion", Lion, 3e-4, 1e-5),
            ("adamw_8bit", AdamW8bit, LR, 1e-2),
            ("adafactor", partial(torch.optim.Adafactor, eps=(None, 1.0)), LR, 1e-3),
            ("sgd", torch.optim.SGD, 0.3, 1e-5),
        ]
    ),
)
def test_reorder_other_optimizers_are_the_libraries_on_plain_pytorch(
    name: str, library: Any, lr: float, apart: float
) -> None:
    plain = plain_losses(wider_model(), partial(library, lr=lr, weight_decay=0.0), 20)
    ours = run(loop_of(wider_model(), optimizer=name, lr=lr), range(20))
    assert ours == pytest.approx(plain, rel=apart)
    assert ours[-1] < ours[0]


@pytest.mark.thorough
def test_reorder_sgd_of_masters() -> None:
    reference = plain_losses(model_of(), lambda p: torch.optim.SGD(p, lr=0.3), 8)
    model, losses = model_of(), []
    engine = offload.attach(
        model, num_slots=2, device="cpu", trained_weights="host", head_chunk_tokens=7
    )
    optimizer = torch.optim.SGD(engine.trained_parameters.values(), lr=0.3)
    for number in range(8):
        losses.append(engine.forward_backward(step_of(number)).loss)
        nn.utils.clip_grad_norm_(list(engine.trained_parameters.values()), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    assert losses == pytest.approx(reference, rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"num_slots": NUM_LAYERS},
        pytest.param({"stash": "host"}, marks=pytest.mark.slow),
        pytest.param({"kept_graphs": 2, "num_slots": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_move_residency_changes_no_bit(options: dict[str, Any]) -> None:
    streamed, other = loop_of(model_of()), loop_of(model_of(), **options)
    assert run(streamed, range(3)) == run(other, range(3))
    assert_same(values_of(streamed), values_of(other))


def test_move_an_update_is_in_the_next_step_and_before_the_layers_load() -> None:
    loop = loop_of(model_of())
    first, second = (loop.step(n, share_of(step_of(n))).timeline for n in range(2))
    assert not first.busy_s(Kind.UPDATE)
    updates = {s.layer: s for s in second.spans if s.kind is Kind.UPDATE}
    loads = [s for s in second.spans if s.kind is Kind.LOAD]
    assert set(updates) == set(range(NUM_LAYERS))
    assert all(updates[s.layer].end_s <= s.start_s for s in loads)
    assert all(s.lane is Lane.HOST for s in updates.values())
    assert engine_of(loop).updates.layers == set(range(NUM_LAYERS))


@pytest.mark.thorough
def test_move_evaluating_after_each_step_changes_no_bit() -> None:
    alone, evaluated = (loop_of(model_of()) for _ in range(2))
    losses = run(alone, range(3))
    held_out = step_of(99)[0]
    for number in range(3):
        assert run(evaluated, [number]) == [losses[number]]
        evaluated._model.eval()
        shown = engine_of(evaluated).forward(held_out).loss_sum
        evaluated._model.train()
        assert not engine_of(evaluated).updates.layers
        expected = copy.deepcopy(weights_of(evaluated))
        with torch.no_grad():
            logits = expected.eval()(input_ids=held_out["input_ids"]).logits[:, :-1]
            plain = nn.functional.cross_entropy(
                logits.flatten(0, 1), held_out["labels"][:, 1:].flatten(), reduction="sum"
            )
        assert shown == pytest.approx(float(plain), rel=1e-5)  # of the weights of this very step
    assert_same(values_of(alone), values_of(evaluated))


def weights_of(loop: Loop) -> nn.Module:
    """Return a plain model with a loop's weights."""
    model = model_of()
    model.load_state_dict({n: loop.weights[n] for n, _ in model.named_parameters()}, strict=False)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(
    "read",
    [
        lambda loop: loop._model.state_dict(),
        lambda loop: engine_of(loop).trained_parameters,
        lambda loop: loop.weights,
        lambda loop: engine_of(loop).close(),
        lambda loop: engine_of(loop).detach(),
    ],
    ids=["state_dict", "trained_parameters", "checkpoint", "close", "detach"],
)
def test_whoever_reads_weights_makes_the_updates_first(read: Callable[[Loop], Any]) -> None:
    loop = loop_of(model_of())
    run(loop, [0])
    assert engine_of(loop).updates.layers
    read(loop)
    assert not engine_of(loop).updates.layers
    assert_same(values_of(loop), values_after_a_step())


@functools.cache
def values_after_a_step() -> dict[str, torch.Tensor]:
    loop = loop_of(model_of())
    run(loop, [0])
    return values_of(loop)


@pytest.mark.thorough
def test_the_values_of_the_ended_step_are_used_whatever_comes_after() -> None:
    """The next step's learning rate, norm and gradients are others."""
    at_once, late = (loop_of(model_of()) for _ in range(2))
    for loop in (at_once, late):
        loop._train = loop._train.model_copy(update={"schedule": "linear", "steps": 4})
        loop._num_steps = 4
    for number in range(4):
        run(at_once, [number])
        engine_of(at_once).updates.flush()
        run(late, [number])
    assert_same(values_of(at_once), values_of(late))


@pytest.mark.thorough
def test_a_rehearsal_leaves_no_trace() -> None:
    rehearsed, other = loop_of(model_of()), loop_of(model_of())
    rehearse(rehearsed, share_of(step_of(7)), [share_of(step_of(8))])
    assert run(rehearsed, range(2)) == run(other, range(2))
    assert_same(values_of(rehearsed), values_of(other))


@pytest.mark.thorough
def test_reorder_without_clipping() -> None:
    loop = loop_of(model_of(), max_norm=None)
    reference = model_of()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0, fused=True)
    for number in range(3):
        expected = plain_gradients(reference, step_of(number))
        optimizer.step()
        optimizer.zero_grad()
        assert run(loop, [number])[0] == pytest.approx(expected, rel=1e-5)


def test_tied_weights_train_once() -> None:
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS["qwen3"]().config)
    config.tie_word_embeddings = True
    make = lambda: type(MODELS["qwen3"]())(config)  # noqa: E731
    torch.manual_seed(1)
    reference = make().train()
    model = copy.deepcopy(reference)
    model.tie_weights()
    loop = loop_of(model)
    losses = plain_losses(
        reference, lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, fused=True), 4
    )
    assert run(loop, range(4)) == pytest.approx(losses, rel=1e-5)
    assert "lm_head.weight" not in loop.weights


# ------------------------------------------------------------------------------------- full float16


NUM_TOKENS = 100_000  # of a large step, of which this is a part: its gradients are small
TOO_LARGE = 2.0**24


def plain_losses_float16(model: Any, num_steps: int) -> tuple[list[float], int]:
    """Train by plain PyTorch; return the losses and how many steps were skipped."""
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, weight_decay=0.0, fused=True)
    model.half()
    scale, losses, num_skipped = TOO_LARGE, [], 0
    for number in range(num_steps):
        batches = step_of(number)
        total, loss = num_labels(batches), 0.0
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
            summed = nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            (scale * summed / total).backward()
            loss += summed.item() / total
            for name, parameter in model.named_parameters():
                if batch is batches[-1] or ".layers." not in name:  # those of layers in float16
                    before, now = masters[name].grad, parameter.grad.float() / scale
                    masters[name].grad = now if before is None else before + now
                    parameter.grad = None
        losses.append(loss)
        gradients = [master.grad for master in masters.values() if master.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            nn.utils.clip_grad_norm_(masters.values(), MAX_NORM)
            optimizer.step()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(masters[name])
        else:
            scale, num_skipped = scale / 2, num_skipped + 1
        optimizer.zero_grad()
    return losses, num_skipped


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_reorder_losses_and_skipped_steps_are_those_of_plain_pytorch() -> None:
    num_steps = 30
    wanted, num_skipped = plain_losses_float16(wider_model().half().float(), num_steps)
    loop = loop_of(wider_model().half())
    loop.scaling = LossScale(factor=TOO_LARGE)
    records = [loop.step(number, share_of(step_of(number))) for number in range(num_steps)]
    assert [record.is_skipped for record in records].count(True) == num_skipped > 0
    assert [record.loss for record in records] == pytest.approx(wanted, rel=1e-3)
    assert wanted[-1] < 0.5 * wanted[0]


def gradients_of_full_float16(
    name: str, dtype: torch.dtype, scale: float
) -> dict[str, torch.Tensor]:
    """Return a step's gradients of all weights: by the engine, or in float64 by plain autograd."""
    base: Any = model_of(name)
    base.set_experts_implementation("eager")  # grouped products have no float64
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(parameter.bfloat16())
    base = base.to(dtype)
    if dtype is torch.float64:
        for batch in step_of(0):
            logits = base(input_ids=batch["input_ids"]).logits[:, :-1]
            nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            ).div(NUM_TOKENS).backward()
        return {n: p.grad for n, p in base.named_parameters() if p.grad is not None}
    engine = offload.attach(base, num_slots=2, device="cpu", trained_weights="host")
    step = RunStep(micro_batches=step_of(0), num_label_tokens=NUM_TOKENS, loss_scale=scale)
    engine.forward_backward_runs([step])
    found = {
        n: p.grad.double() / scale
        for n, p in engine.trained_parameters.items()
        if p.grad is not None
    }
    engine.close()
    return found


def error(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == truth.keys()
    squares = [((ours[name] - true).norm() ** 2, true.norm() ** 2) for name, true in truth.items()]
    return float(sum(e for e, _ in squares) / sum(t for _, t in squares)) ** 0.5


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_gradients_of_all_weights_are_closer_than_those_in_bfloat16(name: str) -> None:
    truth = gradients_of_full_float16(name, torch.float64, 1.0)
    of = {
        "float16": error(gradients_of_full_float16(name, torch.float16, 2.0**16), truth),
        "float16, not scaled": error(gradients_of_full_float16(name, torch.float16, 1.0), truth),
        "bfloat16": error(gradients_of_full_float16(name, torch.bfloat16, 1.0), truth),
    }
    assert of["float16"] <= 0.3 * of["bfloat16"], of
    assert of["float16, not scaled"] > 2 * of["float16"], of


# ------------------------------------------------------------------------------------------ float16


class MeanOfLogps:
    """An objective whose gradients are those of the cross-entropy."""

    reference = None

    def loss(self, scores: Scores) -> StepLoss:
        return StepLoss(value=-scores.policy_N.sum() / NUM_TOKENS, metrics={})


def model_of_float16(name: str, dtype: torch.dtype) -> Any:
    model = tiny(name)
    base: Any = model.get_base_model()
    base.set_experts_implementation("eager")  # grouped products have no float64
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" not in parameter_name:
                parameter.copy_(parameter.bfloat16())
    return model.to(dtype)


def found(model: Any) -> dict[str, torch.Tensor]:
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == sum(p.requires_grad for p in model.parameters())
    return grads


def true_gradients(name: str) -> dict[str, torch.Tensor]:
    model = model_of_float16(name, torch.float64)
    for batch in micro_batches():
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1]
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        ).div(NUM_TOKENS).backward()
    return found(model)


def gradients_in_float16(
    name: str,
    dtype: torch.dtype,
    scale: float,
    *,
    has_router_loss: bool = False,
    options: EngineOptions = OPTIONS,
    **run: Any,
) -> dict[str, torch.Tensor]:
    model = model_of_float16(name, dtype)
    model.get_base_model().config.output_router_logits = has_router_loss
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = parameter.data.float()
    engine = Engine(model, device=torch.device("cpu"), options=options)
    step = RunStep(
        micro_batches=micro_batches(), num_label_tokens=NUM_TOKENS, loss_scale=scale, **run
    )
    engine.forward_backward_runs([step])
    grads = {key: grad / scale for key, grad in found(model).items()}
    engine.detach()
    return grads


def error_float16(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    squares = [((ours[name] - true).norm() ** 2, true.norm() ** 2) for name, true in truth.items()]
    return float(sum(e for e, _ in squares) / sum(t for _, t in squares)) ** 0.5


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_gradients_of_a_scaled_loss_are_closer_than_those_in_bfloat16(name: str) -> None:
    truth = true_gradients(name)
    of = {
        "float16": error_float16(gradients_in_float16(name, torch.float16, 2.0**16), truth),
        "float16, not scaled": error_float16(gradients_in_float16(name, torch.float16, 1.0), truth),
        "bfloat16": error_float16(gradients_in_float16(name, torch.bfloat16, 1.0), truth),
    }
    assert of["float16"] <= 0.3 * of["bfloat16"], of
    assert of["float16, not scaled"] > 2 * of["float16"], of


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("run", [{}, {"objective": MeanOfLogps()}], ids=["loss", "objective"])
def test_each_loss_is_scaled(run: Any, *, is_fused: bool) -> None:
    options = replace(OPTIONS, layer_kernels="fused" if is_fused else "plain")
    ours = gradients_in_float16("llama", torch.float16, 2.0**16, options=options, **run)
    assert error_float16(ours, true_gradients("llama")) <= 3e-3


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("has_router_loss", [False, True])
def test_move_a_power_of_two_changes_no_bit_where_nothing_underflows(
    *, has_router_loss: bool
) -> None:
    """Nor does it change the part of a mixture's router loss."""
    plain, scaled = (
        gradients_in_float16("qwen3_moe", torch.float32, scale, has_router_loss=has_router_loss)
        for scale in (1.0, 2.0**10)
    )
    assert all(torch.equal(plain[key], scaled[key]) for key in plain)


# ------------------------------------------------------------------------------------- sixteen bits


NUM_STEPS, MAX_SEEDS, SIXTEEN_BITS_LR = 8, 20, 1e-3
WHOLE = ("norms", "embed_tokens", "lm_head")
CONFIG = Qwen3Config.from_dict(
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 128,
        "tie_word_embeddings": False,
    }
)

Run = tuple[list[float], dict[str, torch.Tensor]]


def model_of_sixteen_bits(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base: Any = Qwen3ForCausalLM(CONFIG)
        section = LoraSection(rank=4, alpha=8, modules_to_save=WHOLE)
        model = adapters.add_lora(base.to(torch.bfloat16), section, seed=seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zero at the start
                    parameter.normal_(std=0.05)
    return model.train()


def steps_of(seed: int) -> list[list[Batch]]:
    """Return micro-batches with unequal numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(NUM_STEPS):
        step = []
        for number in range(3):
            input_ids = torch.randint(0, 128, (2, 24 - 3 * number), generator=generator)
            labels = input_ids.clone()
            labels[:, : 3 + 4 * number] = -100
            step.append({"input_ids": input_ids, "labels": labels})
        steps.append(step)
    return steps


def num_labels_sixteen_bits(step: Sequence[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)


def plain_sixteen_bits(model: nn.Module, steps: Sequence[Sequence[Batch]]) -> Run:
    """Train as one would without this project; 16-bit weights by copies in fp32."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    updated = {
        name: nn.Parameter(p.detach().float()) if p.dtype is torch.bfloat16 else p
        for name, p in trained.items()
    }
    optimizer = torch.optim.AdamW(updated.values(), lr=SIXTEEN_BITS_LR, weight_decay=0.0)
    losses = []
    for step in steps:
        losses.append(0.0)
        for batch in step:
            num_items = torch.tensor(num_labels_sixteen_bits(step))
            loss = model(**batch, num_items_in_batch=num_items, use_cache=False).loss
            loss.backward()
            losses[-1] += loss.item()
        for name, parameter in trained.items():
            assert parameter.grad is not None
            updated[name].grad = parameter.grad.to(updated[name].dtype)
        nn.utils.clip_grad_norm_(list(updated.values()), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(updated[name])
                parameter.grad = updated[name].grad = None
    return losses, {name: p.detach() for name, p in updated.items()}


def ours(model: nn.Module, steps: Sequence[Sequence[Batch]]) -> Run:
    train = TrainSection(
        grad_accum_steps=3, steps=NUM_STEPS, lr=SIXTEEN_BITS_LR, schedule="constant"
    )
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=16)
    loop = Loop(
        model=model,
        engine=engine,
        update=AdapterUpdate(
            adapters.trained(model), train=train, loraplus_ratio=None, ranks=Ranks()
        ),
        train=train,
        num_steps=NUM_STEPS,
        ranks=Ranks(),
    )
    losses = [
        loop.step(
            number,
            StepShare(
                micro_batches=tuple(step),
                micro_batch_ids=(0, 1, 2),
                num_tokens=num_labels_sixteen_bits(step),
                num_label_tokens=num_labels_sixteen_bits(step),
            ),
        ).loss
        for number, step in enumerate(steps)
    ]
    engine.detach()
    return losses, {name: p.detach() for name, p in loop.weights.items()}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_reorder_steps_in_bf16_with_modules_trained_whole_are_no_worse_than_plain_ones() -> None:
    squares = {"ours": 0.0, "plain": 0.0}
    loss_squares = {"ours": 0.0, "plain": 0.0}
    both = (squares, loss_squares)
    for seed in range(MAX_SEEDS):
        model, steps = model_of_sixteen_bits(seed), steps_of(seed)
        before = {name: p.detach().double() for name, p in adapters.trained(model).items()}
        true_losses, true = plain_sixteen_bits(copy.deepcopy(model).double(), steps)
        runs = {
            "ours": ours(copy.deepcopy(model), steps),
            "plain": plain_sixteen_bits(copy.deepcopy(model), steps),
        }
        for run, (losses, weights) in runs.items():
            assert weights.keys() == true.keys()
            pairs = zip(losses, true_losses, strict=True)
            loss_squares[run] += sum((a - b) ** 2 for a, b in pairs)
            for name, tensor in true.items():  # each tensor counts alike, however small
                moved = (tensor - before[name]).norm()
                squares[run] += float(((weights[name].double() - tensor).norm() / moved) ** 2)
        if seed >= 2 and all(of["ours"] <= SLACK**2 * of["plain"] for of in both):
            return
    pytest.fail(f"squared errors {both}, the limit is {SLACK} in error")


@pytest.mark.usefixtures("one_thread")
def test_the_first_bf16_loss_is_that_of_the_plain_loop() -> None:
    model, steps = model_of_sixteen_bits(0), steps_of(0)[:1]
    losses, _ = ours(copy.deepcopy(model), steps)
    plain_losses, _ = plain_sixteen_bits(model, steps)
    assert losses[0] == pytest.approx(plain_losses[0], rel=1e-6)


# ------------------------------------------------------------------------------------------ reducer


SHARED = "layers.{}.self_attn.q_proj.lora_A.default.weight"


class Doubling:
    """Adds up the gradients of two equal ranks."""

    def __init__(self, engine: Engine, model: PeftModel) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        self.own: list[list[torch.nn.Parameter]] = [[] for _ in range(NUM_LAYERS)]
        self.rest: list[torch.nn.Parameter] = []
        for parameter in trained:
            layer = engine.own_layers.get(id(parameter))
            (self.rest if layer is None else self.own[layer]).append(parameter)
        self.done: list[int | None] = []
        self.threads: set[str] = set()

    @property
    def reduced(self) -> Reduced:
        return Reduced(layers=(1,) * NUM_LAYERS, rest=len(self.rest))

    def reduce(self, layer: int | None) -> None:
        self.done.append(layer)
        self.threads.add(threading.current_thread().name)
        for parameter in self.rest if layer is None else self.own[layer]:
            assert parameter.grad is not None
            parameter.grad *= 2


def late_compute(number: int, lane: Lane, body: Callable[[], None]) -> None:
    time.sleep(0.002 + 0.001 * (number % 2) if lane is Lane.COMPUTE else 0)
    body()


def sharing() -> PeftModel:
    """Return a model whose first two layers share a trained parameter."""
    model = tiny("qwen3")
    first, second = (f"base_model.model.model.{SHARED.format(layer)}" for layer in (0, 1))
    owner = model.get_submodule(second.removesuffix(".weight"))
    owner.register_parameter("weight", model.get_parameter(first))
    return model


def test_move_each_gradient_is_added_up_once_after_its_last_visit() -> None:
    for model in (tiny("qwen3"), sharing()):
        loss, expected = plain(model)
        model = copy.deepcopy(model)
        engine = Engine(model, device=HookedDevice(late_compute), options=OPTIONS)
        doubling = Doubling(engine, model)
        run = RunStep(micro_batches=micro_batches(), dropout_seed=0, reducer=doubling)
        (result,) = engine.forward_backward_runs([run])
        last = [None] if doubling.rest else []
        assert doubling.done == [*reversed(range(NUM_LAYERS)), *last]
        assert doubling.threads == {"sluice-network"}
        sums = [s.layer for s in result.timeline.spans if s.lane is Lane.NETWORK]
        assert sums == doubling.done
        assert abs(result.loss - loss) < 1e-5
        found = gradients(model)
        for name, gradient in expected.items():
            assert torch.allclose(found[name], 2 * gradient, rtol=1e-4, atol=1e-6)
        engine.detach()


def test_a_parameter_of_two_layers_is_no_layers_own() -> None:
    model = sharing()
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    own = engine.own_layers
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_shared = name.endswith(SHARED.format(0))
            layer = int(name.split(".layers.")[1].split(".")[0])
            assert own.get(id(parameter)) == (None if is_shared else layer)
    engine.detach()
