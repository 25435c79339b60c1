"""Full training on the host against plain PyTorch, which is written here without the engine."""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from bitsandbytes.optim.lion import Lion
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import offload
from finetune.full.weights import choose_weights
from finetune.training.loop import Loop
from offload.plan.facts.optimizer import Optimizer
from offload.plan.schedule.op import Kind, Lane
from tests.parity.full_training import (
    LR,
    MAX_NORM,
    Batch,
    assert_same,
    engine_of,
    loop_of,
    model_of,
    num_labels,
    run,
    share_of,
    step_of,
    values_of,
    wider_model,
)
from tests.parity.steps import MODELS, NUM_LAYERS, SHAPE
from tests.rehearsals import rehearse
from tests.tiers import mostly_slow


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
    name: Optimizer, library: Any, lr: float, apart: float
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
