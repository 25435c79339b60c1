"""An output head that trains in host memory, against plain PyTorch, and against the device."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import PhiConfig, PhiForCausalLM, Qwen3Config, Qwen3ForCausalLM

import offload
from finetune.full.chosen_weights import choose_weights
from finetune.run.loss_scale import LossScale
from offload.engine.engine import Engine
from offload.engine.run_step import Reducer, RunStep
from offload.engine.tracing.allocator import LiveBytes
from offload.engine.tracing.tracer import Tracer
from offload.errors import OffloadError, TransferError, UnsupportedModelError
from offload.plan.memory.memory import HEAD, HEAD_GRADIENT
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.schedule import Order
from tests.parity.full_training import (
    LR,
    MAX_NORM,
    assert_same,
    assert_skips_alike,
    engine_of,
    loop_of,
    run,
    share_of,
    step_of,
    values_of,
)
from tests.parity.objectives import ByRow, against_scored, pairs
from tests.parity.steps import MODELS, SHAPE
from tests.parity.untied_models import learned_positions, scaled
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

Batch = dict[str, torch.Tensor]
WEIGHT = "lm_head.weight"
LAYER_BYTES = 40 * 2**10
"""Of the tiny models' layers in fp32, about; a token that the head predicts takes 128."""


def biased() -> nn.Module:
    """Return a model whose head has a bias, which stays on the device."""
    return PhiForCausalLM(PhiConfig(**SHAPE | {"num_key_value_heads": 4}))


def wide() -> nn.Module:
    """Return a model whose head and its gradient do not fit in two slots."""
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"vocab_size": 1000}))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "qwen3": MODELS["qwen3"],
    "qwen3_moe": MODELS["qwen3_moe"],
    "wide": wide,
    "biased": biased,
    "scaled": scaled,
    "learned_positions": learned_positions,
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]().train()


def plain_step(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Add a step's gradients to `.grad` by plain autograd, and return its loss."""
    num = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        (loss / num).backward()
        total += loss.item() / num
    return total


def apart(ours: torch.Tensor, plain: torch.Tensor) -> float:
    return float((ours.double() - plain.double()).norm() / plain.double().norm())


def attached(model: nn.Module, **options: Any) -> Engine:
    options = {"num_slots": 2, "head": "host", **options}
    return offload.attach(
        model, device="cpu", trained_weights="host", head_chunk_tokens=7, **options
    )


# ---------------------------------------------------------------------------------- plain PyTorch


@pytest.mark.parametrize("num_slots", mostly_slow([2, 3, 4], 2))
@pytest.mark.parametrize("kind", mostly_slow(list(KINDS), "wide", "biased"))
def test_reorder_gradients_are_those_of_plain_pytorch_at_its_weights(
    kind: str, num_slots: int
) -> None:
    reference = made(kind)
    engine = attached(copy.deepcopy(reference), num_slots=num_slots)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0)
    for number in range(3):
        masters = engine.trained_parameters
        plain = dict(reference.named_parameters())
        assert masters.keys() == plain.keys()
        with torch.no_grad():
            for name, parameter in plain.items():
                masters[name].copy_(parameter)
        loss = plain_step(reference, step_of(number))
        assert engine.forward_backward(step_of(number)).loss == pytest.approx(loss, rel=1e-6)
        for name in plain:
            ours, theirs = masters[name].grad, plain[name].grad
            assert ours is not None
            assert theirs is not None
            if float(theirs.norm()) > 1e-9:  # biases of keys have none but rounding
                assert apart(ours, theirs) <= (1e-6 if name == WEIGHT else 1e-5), name
            masters[name].grad = None
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()


@pytest.mark.parametrize("kind", mostly_slow(["qwen3", "wide"], "wide"))
def test_reorder_losses_with_sgd_and_clipping_are_those_of_plain_pytorch(kind: str) -> None:
    reference = made(kind)
    loop = loop_of(copy.deepcopy(reference), optimizer="sgd", lr=0.3, head="host")
    optimizer, losses = torch.optim.SGD(reference.parameters(), lr=0.3), []
    for number in range(20):
        losses.append(plain_step(reference, step_of(number)))
        norm = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        assert float(norm) > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
    assert run(loop, range(20)) == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
    weight = dict(reference.named_parameters())[WEIGHT].detach()
    assert apart(loop.weights[WEIGHT], weight) <= 1e-5


# ---------------------------------------------------------------------------------- to the bit


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd", "lr": 0.3},
    "lion_bf16": {"optimizer": "lion_bf16"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "stashed": {"stash": "host", "kept_graphs": 2, "num_slots": 3},
    "resident": {"num_slots": 4},
    "with the embedding": {"embeddings": "host"},
    "without clipping": {"max_norm": None},
}


@pytest.mark.parametrize("settings", mostly_slow(SETTINGS, "adamw", "stashed"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_move_training_on_the_host_is_that_on_the_device(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Losses, norms, weights, low halves and states of four steps."""
    host, device = (
        loop_of(made("qwen3").to(dtype), head=place, **settings) for place in ("host", "device")
    )
    for number in range(4):
        ours, theirs = (x.step(number, share_of(step_of(number))) for x in (host, device))
        assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm)
    assert_same(values_of(host), values_of(device))


@pytest.mark.parametrize("kind", mostly_slow(list(KINDS), "wide", "biased"))
def test_move_training_of_other_models_is_that_on_the_device(kind: str) -> None:
    host, device = (loop_of(made(kind), head=place) for place in ("host", "device"))
    assert run(host, range(3)) == run(device, range(3))
    assert_same(values_of(host), values_of(device))


@pytest.mark.parametrize("num_slots", mostly_slow([3, 4], 4))
def test_move_layers_under_the_gradient_alone_are_loaded_again(num_slots: int) -> None:
    """Weight and gradient of 400 rows of 32 in fp32 take 50 KiB each, a slot takes 40."""
    found = []
    for place in ("host", "device"):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"vocab_size": 400})).train()
        loop = loop_of(model, head=place, num_slots=num_slots)
        found.append((run(loop, range(3)), values_of(loop)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


@pytest.mark.thorough
def test_move_float16_is_scaled_checked_and_skipped_as_on_the_device() -> None:
    assert_skips_alike(
        [loop_of(made("qwen3").half(), head=place) for place in ("host", "device")], step_of
    )


def test_an_overflow_of_the_head_alone_skips_the_step() -> None:
    loop = loop_of(made("qwen3").half(), head="host")
    loop.scaling = LossScale(factor=8.0)
    run(loop, [0])
    before = {name: value.clone() for name, value in loop.weights.items()}
    gradient = engine_of(loop).head_gradient
    assert gradient is not None
    send_back = gradient.send_back

    def with_one(*args: Any, **kwargs: Any) -> None:
        gradient._sum[0, 0] = torch.inf
        send_back(*args, **kwargs)

    gradient.send_back = with_one  # type: ignore[method-assign]
    assert loop.step(1, share_of(step_of(1))).is_skipped
    assert_same(values_of(loop), before)
    gradient.send_back = send_back  # type: ignore[method-assign]
    assert not loop.step(2, share_of(step_of(2))).is_skipped


@pytest.mark.thorough
def test_move_evaluating_between_steps_changes_no_bit_and_sees_the_newest_head() -> None:
    alone, evaluated = (loop_of(made("wide"), head="host") for _ in range(2))
    held_out = step_of(99)[0]
    for number in range(3):
        assert run(evaluated, [number]) == run(alone, [number])
        evaluated._model.eval()
        shown = engine_of(evaluated).forward(held_out).loss_sum
        evaluated._model.train()
        plain = made("wide").eval()
        weights = {name: evaluated.weights[name] for name, _ in plain.named_parameters()}
        plain.load_state_dict(weights, strict=False)
        with torch.no_grad():
            logits = plain(input_ids=held_out["input_ids"]).logits[:, :-1]
            expected = nn.functional.cross_entropy(
                logits.flatten(0, 1), held_out["labels"][:, 1:].flatten(), reduction="sum"
            )
        assert shown == pytest.approx(float(expected), rel=1e-5)
    assert_same(values_of(alone), values_of(evaluated))


def test_an_evaluation_leaves_a_gradient_that_waits_for_its_optimizer() -> None:
    engine = attached(made("qwen3"))
    engine.forward_backward(step_of(0))
    gradient = engine.trained_parameters[WEIGHT].grad
    assert gradient is not None
    before = gradient.clone()
    engine.forward(step_of(1)[0])
    assert engine.trained_parameters[WEIGHT].grad is gradient
    assert torch.equal(gradient, before)
    engine.detach()


@pytest.mark.parametrize(
    ("dtype", "is_packed"),
    mostly_slow(
        [(dtype, packed) for dtype in (torch.float32, torch.bfloat16) for packed in (False, True)],
        (torch.bfloat16, False),
        rest=pytest.mark.thorough,
    ),
)
def test_move_gradients_by_the_library_are_those_on_the_device(
    dtype: torch.dtype, *, is_packed: bool
) -> None:
    """They are added up in the weight's own type, as by plain PyTorch; rows are packed or not."""
    batches = step_of(0)
    if is_packed:
        rows = torch.cat([batch["input_ids"] for batch in batches], dim=1)[:1]
        lens = torch.tensor([9, 12, 15])
        batches = [{"input_ids": rows, "labels": rows, "row_lens": lens}] * 2
    found = []
    for place in ("host", "device"):
        engine = attached(made("wide").to(dtype), head=place)
        engine.forward_backward(batches)
        gradient = engine.trained_parameters[WEIGHT].grad
        assert gradient is not None
        assert gradient.dtype is dtype
        found.append(gradient.clone())
        engine.detach()
    assert torch.equal(*found)
    assert found[0].any()


@pytest.mark.thorough
def test_move_preference_losses_are_the_same_with_rows_that_are_only_scored() -> None:
    found, gradients = [], []
    for place in ("device", "host"):
        model = made("wide")
        engine = attached(model, head=place)
        objective = ByRow(against_scored, num_trained=6, reference=None)
        one: dict[str, Any] = {"objective": objective, "scored": pairs(1, seed=7)}
        trained = engine.forward_backward(pairs(1, 2), **one)
        grads = {n: p.grad for n, p in engine.trained_parameters.items()}
        evaluated = engine.evaluate(pairs(1, 2), **one)
        found.append((trained.loss, trained.metrics, evaluated.loss))
        gradients.append({n: g.clone() for n, g in grads.items() if g is not None})
        engine.detach()
    assert found[0] == found[1]
    assert_same(*gradients)
    assert WEIGHT in gradients[0]


def test_a_micro_batch_without_labels_comes_first_and_changes_nothing() -> None:
    batches = step_of(0)
    batches[0]["labels"].fill_(-100)
    found = []
    for place in ("device", "host"):
        loop = loop_of(made("qwen3"), head=place)
        found.append((loop.step(0, share_of(batches)).loss, values_of(loop)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


# ---------------------------------------------------------------------------------- how it is done


def test_the_gradient_comes_back_once_after_all_tails_and_layers_are_loaded_after_it() -> None:
    """Counted without our own code: of 64 rows of 32 in fp32, and 1,000 over both slots."""
    for kind, num_rows in (("qwen3", 64), ("wide", 1000)):
        loop = loop_of(made(kind), head="host")
        spans = loop.step(0, share_of(step_of(0))).timeline.spans
        sent = [span for span in spans if span.kind is Kind.HEAD_GRADIENT]
        assert sum(span.num_bytes for span in sent) == 4 * 32 * num_rows
        assert {span.lane for span in sent} == {Lane.D2H}
        last = max(span.end_s for span in spans if span.kind is Kind.TAIL)
        assert sent[0].start_s >= last
        loads = [span for span in spans if span.kind is Kind.LOAD and span.start_s >= last]
        covered = [span for span in spans if span.kind is Kind.HEAD]
        assert len(loads) == 2 + (2 if kind == "wide" else 1)
        assert all(span.start_s >= sent[-1].end_s for span in loads[1:])
        assert sum(span.num_bytes for span in covered) == 4 * 32 * num_rows
        sizes = {arena.name: arena.num_bytes for arena in engine_of(loop).arenas}
        assert sizes[HEAD] == sizes[HEAD_GRADIENT] == 4 * 32 * num_rows
        (slots,) = (arena for arena in engine_of(loop).arenas if arena.name == "slots")
        assert slots.num_bytes == max(
            2 * engine_of(loop)._host.records[0].num_bytes, 256 * num_rows
        )
        evaluated = engine_of(loop)._steps.forward(engine_of(loop)._ring).ops
        assert not any(op.kind is Kind.HEAD_GRADIENT for op in evaluated)


def test_between_passes_no_gradient_is_in_a_slot_and_no_hook_is_left() -> None:
    model: Any = made("wide")
    engine = attached(model)
    weight = model.lm_head.weight
    (slots,) = (arena for arena in engine.arenas if arena.name == "slots")
    (block,) = slots.blocks
    inside = range(block.data_ptr(), block.data_ptr() + block.nbytes)
    for number in range(2):
        engine.forward_backward(step_of(number))
        assert weight.grad.data_ptr() not in inside
        assert weight.data_ptr() not in inside
        assert not weight._post_accumulate_grad_hooks
        for parameter in engine.trained_parameters.values():
            parameter.grad = None
    engine.detach()
    plain_step(model, step_of(0))  # trains as ever
    assert weight.grad is not None


def test_a_step_after_one_that_failed_has_its_own_gradients_alone() -> None:
    engine, failed = attached(made("wide")), attached(made("wide"))
    engine.forward_backward(step_of(1))
    expected = engine.trained_parameters[WEIGHT].grad
    gradient = failed.head_gradient
    assert gradient is not None
    with (
        mock.patch.object(gradient, "send_back", side_effect=OSError("no more")),
        pytest.raises(TransferError, match="no more"),
    ):
        failed.forward_backward(step_of(0))
    for parameter in failed.trained_parameters.values():
        parameter.grad = None
    failed.forward_backward(step_of(1))
    again = failed.trained_parameters[WEIGHT].grad
    assert again is not None
    assert expected is not None
    assert torch.equal(again, expected)
    for one in (engine, failed):
        one.close()


def test_the_device_holds_one_new_gradient_of_the_table_and_neither_weight_nor_sum() -> None:
    """A table of 8,192 rows, whose gradient is there in two types on the device."""
    num_rows, width = 8192, 32
    batches = step_of(0)
    for batch in batches:
        batch["labels"][:, :-1] = -100
    peaks, held = {}, {}
    for place in ("device", "host"):
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"vocab_size": num_rows}))
        model = model.to(torch.bfloat16).train()
        choose_weights(model, [WEIGHT, "model.layers.*"])
        loop = loop_of(model, head=place)
        memory = LiveBytes()
        for _ in range(2):
            memory.reset_peak()
            with Tracer(memory):
                engine_of(loop).forward_backward(batches)
            peaks[place], peaks[f"{place}, largest"] = memory.peak_bytes, memory.largest_bytes
            loop.update.gather(0.0, loss_scale=1.0)
            loop.update.apply(lr=LR)
        held[place] = engine_of(loop).slot_bytes
    in_fp32 = 4 * num_rows * width
    assert peaks["device, largest"] == in_fp32  # the sum
    assert peaks["host, largest"] == in_fp32 // 2  # one new gradient, in bfloat16
    assert peaks["device"] - peaks["host"] == pytest.approx(in_fp32, rel=0.05)
    assert held["host"] == in_fp32 + in_fp32 // 2  # slots as large as weight and sum


# ---------------------------------------------------------------------------------- refused


def test_what_cannot_train_on_the_host_is_refused_by_name() -> None:
    tied: Any = MODELS["gemma3_text"]()
    with pytest.raises(UnsupportedModelError, match="has the same weight as `lm_head`"):
        attached(tied)
    model: Any = made("qwen3").requires_grad_(requires_grad=False)
    model.lm_head.requires_grad_()
    with pytest.raises(UnsupportedModelError, match="`lm_head` trains") as alone:
        offload.attach(model, num_slots=2, device="cpu", head="host")
    assert alone.value.limit == 'it may if `trained_weights` is "host" too'
    assert alone.value.hint == '`head="device"`'


def test_a_step_that_the_gradient_would_not_be_whole_in_is_refused() -> None:
    model: Any = made("qwen3")
    engine = attached(model)
    run = RunStep(micro_batches=step_of(0), reducer=mock.create_autospec(Reducer))
    with pytest.raises(OffloadError, match="the output head trains on the host") as many:
        engine.forward_backward_runs([run])
    assert many.value.hint == '`head="device"`'
    engine.detach()
    model.requires_grad_(requires_grad=False)
    model.lm_head.requires_grad_()
    engine = attached(model)
    with pytest.raises(OffloadError, match="micro_batch_major where the output head trains"):
        engine.forward_backward(step_of(0), order=Order.MICRO_BATCH_MAJOR)
    assert model.lm_head.weight.grad is None
    engine.forward_backward(step_of(0))
    with pytest.raises(OffloadError, match=f"{WEIGHT} still has the gradient of an earlier step"):
        engine.forward_backward(step_of(1))
    engine.detach()


def test_hooks_that_no_gradient_would_reach_are_refused() -> None:
    model: Any = made("qwen3")
    engine = attached(model)

    def hook(_parameter: Any) -> None:
        """Do nothing."""

    hook.takes_partial_gradients = True  # type: ignore[attr-defined]
    handle = model.lm_head.weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(OffloadError, match=f"{WEIGHT}, as `engine.trained_parameters` lists it"):
        engine.forward_backward(step_of(0))
    handle.remove()
    engine.detach()


@pytest.mark.parametrize("stash", ["device", "host"])
def test_reorder_packed_rows_train_a_model_in_ram_as_plain_pytorch_trains_rows_alone(
    stash: Literal["device", "host"],
) -> None:
    """All is in RAM that may be: layers, embedding, head. The reference has one row at a time."""
    config = Qwen3Config(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    torch.manual_seed(11)
    plain = Qwen3ForCausalLM(config).train()
    streamed = copy.deepcopy(plain)
    steps = [[[torch.randint(67, (n,)) for n in lens] for lens in ((5, 3, 7), (9, 2))] * 2] * 4
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4, foreach=False)
    expected = []
    for step in steps:
        rows = [row for rows in step for row in rows]
        num = sum(len(row) - 1 for row in rows)
        total = 0.0
        for row in rows:
            logits = plain(row[None]).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum") / num
            loss.backward()
            total += loss.item()
        expected.append(total)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        reference.step()
        reference.zero_grad()
    engine = offload.attach(
        streamed,
        num_slots=2,
        device="cpu",
        stash=stash,
        trained_weights="host",
        embeddings="host",
        head="host",
        head_chunk_tokens=4,
    )
    optimizer = torch.optim.AdamW(
        engine.trained_parameters.values(), lr=1e-2, eps=1e-4, foreach=False
    )
    losses = []
    for step in steps:
        packed = [
            {
                "input_ids": torch.cat(rows)[None],
                "labels": torch.cat(rows)[None],
                "row_lens": torch.tensor([len(row) for row in rows]),
            }
            for rows in step
        ]
        losses.append(engine.forward_backward(packed).loss)
        torch.nn.utils.clip_grad_norm_(engine.trained_parameters.values(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    for (name, ours), (_, theirs) in zip(
        streamed.named_parameters(), plain.named_parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5, msg=name)
