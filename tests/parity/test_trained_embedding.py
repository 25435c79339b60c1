"""An input embedding that trains in host memory, against plain PyTorch, and against the device."""

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import offload
from finetune.full.chosen_weights import choose_weights
from finetune.run.loss_scale import LossScale
from finetune.training.full.update import _InRows
from finetune.training.loop import Loop
from offload.engine.engine import Engine
from offload.engine.host.embedding import OtherRows, RowSums
from offload.engine.run_step import Reducer, RunStep
from offload.engine.tracing.allocator import LiveBytes
from offload.engine.tracing.tracer import Tracer
from offload.errors import OffloadError, TransferError, UnsupportedModelError
from offload.plan.memory.memory import EMBEDDING_GRADIENTS, EMBEDDINGS
from offload.plan.schedule.op import Kind, Lane
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
from tests.parity.steps import MODELS, SHAPE
from tests.parity.untied_models import learned_positions, scaled
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

Batch = dict[str, torch.Tensor]
PADDING = 7
TOKENS = "model.embed_tokens.weight"


def padded() -> nn.Module:
    """Return a model one of whose tokens has no gradient."""
    return LlamaForCausalLM(LlamaConfig(**SHAPE, pad_token_id=PADDING))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "qwen3": MODELS["qwen3"],
    "qwen3_moe": MODELS["qwen3_moe"],
    "padded": padded,
    "scaled": scaled,
    "learned_positions": partial(learned_positions, pad_token_id=PADDING),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]().train()


def name_of(model: nn.Module) -> str:
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    (name,) = (n for n, p in model.named_parameters() if p is embedding.weight)
    return name


def rows_of(number: int) -> list[Batch]:
    """Micro-batches of few tokens, each of which is there often; other steps have others too."""
    generator = torch.Generator().manual_seed(number)
    batches = []
    for width in (9, 12, 15, 11):
        ids = 5 + torch.randint(0, 9, (2, width), generator=generator) * (1 + number % 4)
        ids[0, 1::4] = PADDING
        labels = ids.clone()
        labels[:, :2] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


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


# ---------------------------------------------------------------------------------- plain PyTorch


@pytest.mark.parametrize("kind", mostly_slow(list(KINDS), "padded", "scaled"))
def test_reorder_gradients_are_those_of_plain_pytorch_at_its_weights(kind: str) -> None:
    reference = made(kind)
    name = name_of(reference)
    engine = offload.attach(
        copy.deepcopy(reference),
        num_slots=2,
        device="cpu",
        trained_weights="host",
        embeddings="host",
        head_chunk_tokens=7,
    )
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0)
    has_padding = kind in ("padded", "learned_positions")
    for number in range(3):
        masters = engine.trained_parameters
        assert masters.keys() == {n for n, _ in reference.named_parameters()}
        with torch.no_grad():
            for n, parameter in reference.named_parameters():
                masters[n].copy_(parameter)
        loss = plain_step(reference, rows_of(number))
        assert engine.forward_backward(rows_of(number)).loss == pytest.approx(loss, rel=1e-6)
        ours, plain = masters[name].grad, dict(reference.named_parameters())[name].grad
        assert ours is not None
        assert plain is not None
        assert apart(ours, plain) <= 1e-6
        ids = torch.cat([batch["input_ids"].flatten() for batch in rows_of(number)])
        assert ids.bincount().max() > 2  # some token is there often
        assert PADDING in ids
        assert bool(ours[PADDING].any()) != has_padding
        assert torch.equal(ours.any(dim=1), plain.any(dim=1))
        for parameter in masters.values():
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()


def test_reorder_losses_with_sgd_are_those_of_plain_pytorch() -> None:
    reference = made("padded")
    loop = loop_of(copy.deepcopy(reference), optimizer="sgd", lr=0.3, embeddings="host")
    optimizer, losses = torch.optim.SGD(reference.parameters(), lr=0.3), []
    for number in range(20):
        losses.append(plain_step(reference, step_of(number)))
        nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    assert run(loop, range(20)) == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]


def attached(model: nn.Module) -> Engine:
    return offload.attach(
        model,
        num_slots=2,
        device="cpu",
        trained_weights="host",
        embeddings="host",
        head_chunk_tokens=7,
    )


def test_a_gradient_that_its_user_has_changed_is_gone_in_the_next_step() -> None:
    engine, untouched = attached(made("padded")), attached(made("padded"))
    engine.forward_backward(rows_of(0))
    for parameter in engine.trained_parameters.values():
        assert parameter.grad is not None
        parameter.grad.fill_(torch.nan)  # as clipping by a norm of NaN would
        parameter.grad = None
    for one in (engine, untouched):
        one.forward_backward(rows_of(1))
    ours, theirs = (one.trained_parameters[TOKENS].grad for one in (engine, untouched))
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours, theirs)
    for one in (engine, untouched):
        one.detach()


def test_gradients_by_rows_are_added_up_over_processes_if_all_others_are() -> None:
    engine, reducer = attached(made("padded")), mock.create_autospec(Reducer)
    run = RunStep(micro_batches=rows_of(0), reducer=reducer)
    with pytest.raises(OffloadError, match="the input embedding trains on the host") as refused:
        engine.forward_backward_runs([run])
    assert refused.value.hint == '`embeddings="device"`'
    assert engine.row_sums is not None
    engine.row_sums.share_with(mock.create_autospec(OtherRows), is_own=True)
    with pytest.raises(OffloadError, match="are added up over processes, and no others") as refused:
        engine.forward_backward(rows_of(0))
    assert refused.value.hint == "`RunStep(..., reducer=...)`"
    engine.detach()


def losses_of(loop: Loop, numbers: Sequence[int] = range(3)) -> list[float]:
    return [loop.step(number, share_of(rows_of(number))).loss for number in numbers]


def few_tokens(number: int) -> list[Batch]:
    """Rows of the tokens from 8 times a number on: no other step has them."""
    generator = torch.Generator().manual_seed(number)
    rows = [torch.randint(8 * number, 8 * number + 8, (2, 9), generator=generator) for _ in "ab"]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def test_reorder_moments_decay_where_a_token_is_not_seen_as_in_plain_pytorch() -> None:
    """Gradients of a step are of eight rows, and AdamW still updates all that were ever seen."""
    reference = made("qwen3")
    loop = loop_of(copy.deepcopy(reference), max_norm=None, embeddings="host")
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0, fused=True)
    weight = dict(reference.named_parameters())[TOKENS]
    seen: list[torch.Tensor] = []
    for number in range(4):
        plain_step(reference, few_tokens(number))
        optimizer.step()
        optimizer.zero_grad()
        loop.step(number, share_of(few_tokens(number)))
        ours, state = loop.weights, optimizer.state[weight]
        assert apart(ours[f"{TOKENS}:mean"], state["exp_avg"]) <= 1e-5
        assert apart(ours[f"{TOKENS}:square"], state["exp_avg_sq"]) <= 1e-5
        assert apart(ours[TOKENS], weight.detach()) <= 1e-5
        seen.append(ours[TOKENS][:8].clone())
        assert not ours[f"{TOKENS}:mean"][8 * number + 8 :].any()
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_weight_decay_is_that_of_a_matrix_for_rows_that_no_step_has() -> None:
    found = []
    for embeddings in ("device", "host"):
        loop = loop_of(made("qwen3"), embeddings=embeddings)
        loop.update._optimizer._weight_decay = 0.5  # type: ignore[attr-defined]
        before = loop.weights[TOKENS].clone()
        loop.step(0, share_of(few_tokens(0)))
        after = loop.weights[TOKENS].clone()
        assert torch.allclose(after[8:], before[8:] * (1 - LR * 0.5), rtol=1e-6)
        found.append(after)
    assert torch.equal(*found)


# ---------------------------------------------------------------------------------- to the bit


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd", "lr": 0.3},
    "lion_bf16": {"optimizer": "lion_bf16"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "stashed": {"stash": "host", "kept_graphs": 2, "num_slots": 3},
    "without clipping": {"max_norm": None},
}


@pytest.mark.parametrize("settings", mostly_slow(SETTINGS, "adamw", "stashed"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_move_training_on_the_host_is_that_on_the_device(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Losses, norms, weights, low halves and states of four steps."""
    host, device = (
        loop_of(made("padded").to(dtype), embeddings=place, **settings)
        for place in ("host", "device")
    )
    for number in range(4):
        ours, theirs = (x.step(number, share_of(rows_of(number))) for x in (host, device))
        assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm)
    assert_same(values_of(host), values_of(device))


@pytest.mark.parametrize("kind", mostly_slow(list(KINDS), "scaled"))
def test_move_training_of_other_models_is_that_on_the_device(kind: str) -> None:
    host, device = (loop_of(made(kind), embeddings=place) for place in ("host", "device"))
    assert losses_of(host) == losses_of(device)
    assert_same(values_of(host), values_of(device))


@pytest.mark.thorough
def test_move_float16_is_scaled_checked_and_skipped_as_on_the_device() -> None:
    assert_skips_alike(
        [loop_of(made("padded").half(), embeddings=place) for place in ("host", "device")], rows_of
    )


def test_an_overflow_of_the_embedding_alone_skips_the_step() -> None:
    loop = loop_of(made("qwen3").half(), embeddings="host")
    loop.scaling = LossScale(factor=8.0)
    losses_of(loop, [0])
    before = {name: value.clone() for name, value in loop.weights.items()}
    sums = engine_of(loop).row_sums
    assert sums is not None
    add, is_first = sums.add, True

    def with_one(tokens_N: torch.Tensor, rows_ND: torch.Tensor) -> None:
        nonlocal is_first
        if is_first:
            rows_ND[0, 0] = torch.inf
        is_first = False
        add(tokens_N, rows_ND)

    sums.add = with_one  # type: ignore[method-assign]
    assert loop.step(1, share_of(rows_of(1))).is_skipped
    assert_same(values_of(loop), before)
    assert not loop.step(2, share_of(rows_of(2))).is_skipped


@pytest.mark.thorough
def test_move_evaluating_between_steps_changes_no_bit_and_sees_the_newest_rows() -> None:
    alone, evaluated = (loop_of(made("padded"), embeddings="host") for _ in range(2))
    held_out = rows_of(99)[0]
    for number in range(3):
        assert losses_of(evaluated, [number]) == losses_of(alone, [number])
        evaluated._model.eval()
        shown = engine_of(evaluated).forward(held_out).loss_sum
        evaluated._model.train()
        plain = made("padded").eval()
        weights = {name: evaluated.weights[name] for name, _ in plain.named_parameters()}
        plain.load_state_dict(weights, strict=False)
        with torch.no_grad():
            logits = plain(input_ids=held_out["input_ids"]).logits[:, :-1]
            expected = nn.functional.cross_entropy(
                logits.flatten(0, 1), held_out["labels"][:, 1:].flatten(), reduction="sum"
            )
        assert shown == pytest.approx(float(expected), rel=1e-5)
    assert_same(values_of(alone), values_of(evaluated))


@pytest.mark.parametrize(
    ("dtype", "is_packed"),
    mostly_slow(
        [(dtype, packed) for dtype in (torch.float32, torch.bfloat16) for packed in (False, True)],
        (torch.bfloat16, True),
        rest=pytest.mark.thorough,
    ),
)
def test_move_gradients_by_the_library_are_those_on_the_device(
    dtype: torch.dtype, *, is_packed: bool
) -> None:
    """They are added up in the weight's own type, as by plain PyTorch; rows are packed or not."""
    batches = rows_of(0)
    if is_packed:
        rows = torch.cat([batch["input_ids"] for batch in batches], dim=1)[:1]
        lens = torch.tensor([9, 12, 15, 11])
        batches = [{"input_ids": rows, "labels": rows, "row_lens": lens}] * 2
    found = []
    for place in ("host", "device"):
        model: Any = made("padded").to(dtype)
        engine = offload.attach(
            model, num_slots=2, device="cpu", trained_weights="host", embeddings=place
        )
        engine.forward_backward(batches)
        gradient = engine.trained_parameters[TOKENS].grad
        assert gradient is not None
        assert gradient.dtype is dtype
        found.append(gradient.clone())
        engine.detach()
    assert torch.equal(*found)
    assert found[0].any()


# ---------------------------------------------------------------------------------- how it is done


def test_gradients_of_each_row_come_back_once_and_are_added_in_order() -> None:
    """Counted without our own code: a row of 32 in fp32 for each token that a micro-batch has."""
    loop = loop_of(made("qwen3"), embeddings="host")
    spans = loop.step(0, share_of(step_of(0))).timeline.spans
    distinct = [len(set(batch["input_ids"].flatten().tolist())) for batch in step_of(0)]
    by_kind = {
        kind: [span for span in spans if span.kind is kind]
        for kind in (Kind.FRONT_BACKWARD, Kind.ROW_GRADIENTS, Kind.ADD_ROWS)
    }
    for kind, lane in ((Kind.ROW_GRADIENTS, Lane.D2H), (Kind.ADD_ROWS, Lane.HOST)):
        assert [span.num_bytes for span in by_kind[kind]] == [32 * 4 * num for num in distinct]
        assert {span.lane for span in by_kind[kind]} == {lane}
        assert [span.micro_batch for span in by_kind[kind]] == [0, 1, 2]
    for backward, leaves, added in zip(*by_kind.values(), strict=True):
        assert backward.end_s <= leaves.start_s <= leaves.end_s <= added.start_s
    sizes = {arena.name: arena.num_bytes for arena in engine_of(loop).arenas}
    assert sizes[EMBEDDINGS] == sizes[EMBEDDING_GRADIENTS] == 64 * 32 * 4
    evaluated = engine_of(loop)._steps.forward(engine_of(loop)._ring).ops
    assert not any(op.kind in (Kind.ROW_GRADIENTS, Kind.ADD_ROWS) for op in evaluated)


def test_a_step_after_one_that_failed_has_its_own_gradients_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attached() -> tuple[Engine, nn.Parameter]:
        model: Any = made("qwen3")
        engine = offload.attach(
            model, num_slots=2, device="cpu", trained_weights="host", embeddings="host"
        )
        return engine, engine.trained_parameters[TOKENS]

    engine, weight = attached()
    engine.forward_backward(step_of(1))
    expected = weight.grad
    failed, again = attached()
    add, num = RowSums.add, 0

    def failing(self: RowSums, *args: torch.Tensor) -> None:
        nonlocal num
        num += 1
        if num == 2:
            raise OSError("no more")
        add(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RowSums, "add", failing)
        with pytest.raises(TransferError, match="no more"):
            failed.forward_backward(step_of(0))
    for parameter in failed.trained_parameters.values():
        parameter.grad = None
    failed.forward_backward(step_of(1))
    assert again.grad is not None
    assert expected is not None
    assert torch.equal(again.grad, expected)
    for one in (engine, failed):
        one.close()


def test_no_tensor_on_the_device_is_as_large_as_the_table() -> None:
    """Of 8,192 rows a step has at most 64: on the device, the gradient is there in two types.

    A row has one label, so that logits are few.
    """
    num_rows, width = 8192, 32
    batches = step_of(0)
    for batch in batches:
        batch["labels"][:, :-1] = -100
    peaks = {}
    for place in ("device", "host"):
        torch.manual_seed(0)
        config = Qwen3Config(**SHAPE | {"vocab_size": num_rows})
        model: Any = Qwen3ForCausalLM(config)
        model = model.to(torch.bfloat16).train()
        choose_weights(model, [TOKENS, "model.layers.*"])
        loop = loop_of(model, embeddings=place)
        memory = LiveBytes()
        for _ in range(2):
            memory.reset_peak()
            with Tracer(memory):
                engine_of(loop).forward_backward(batches)
            peaks[place], peaks[f"{place}, largest"] = memory.peak_bytes, memory.largest_bytes
            loop.update.gather(0.0, loss_scale=1.0)
            loop.update.apply(lr=LR)
    in_fp32 = 4 * num_rows * width
    assert peaks["device, largest"] == in_fp32  # the sum
    assert peaks["host, largest"] < in_fp32 / 2  # the table in bfloat16
    assert peaks["device"] - peaks["host"] > in_fp32


def test_the_norm_for_a_gpu_is_exact_where_a_sum_in_fp32_is_not() -> None:
    """Of 10 million numbers, a third of whose rows are zero; the reference adds up in fp64."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(10_000, 1_000))
    sums = RowSums(weight.data)
    tokens_N = torch.arange(10_000)[torch.arange(10_000) % 3 > 0]
    around = _InRows(weight, sums, is_cpu=False)
    sums.add(tokens_N, 1e-4 * torch.randn(len(tokens_N), 1_000))
    exact = float(sums.total.double().pow_(2).sum().sqrt())
    assert float(around.norm()) == pytest.approx(exact, rel=1e-7)
    assert abs(float(torch.linalg.vector_norm(sums.total)) - exact) > 1e-5 * exact


# ---------------------------------------------------------------------------------- refused


def attach_to(model: nn.Module) -> Engine:
    return offload.attach(
        model, num_slots=2, device="cpu", trained_weights="host", embeddings="host"
    )


def test_a_tied_embedding_is_refused_by_name() -> None:
    model: Any = MODELS["gemma3_text"]()
    with pytest.raises(
        UnsupportedModelError, match=r"`lm_head` has the same weight as `model\.embed"
    ) as refused:
        attach_to(model)
    assert refused.value.hint == '`embeddings="device"`'
    offload.attach(model, num_slots=2, device="cpu", trained_weights="host").detach()


def test_a_weight_that_something_else_reads_is_refused_before_its_gradient_is_lost() -> None:
    model: Any = made("qwen3")

    def with_mean(module: Any, _ids: Any, found_BTD: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = module.weight.mean()
        return found_BTD + mean

    model.get_input_embeddings().register_forward_hook(with_mean)
    with pytest.raises(UnsupportedModelError, match="read by something else than lookups"):
        attach_to(model).forward_backward(rows_of(0))


def test_hooks_that_no_gradient_would_reach_are_refused() -> None:
    model: Any = made("qwen3")
    engine = attach_to(model)

    def hook(_parameter: Any) -> None:
        """Do nothing."""

    hook.takes_partial_gradients = True  # type: ignore[attr-defined]
    handle = model.get_input_embeddings().weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(OffloadError, match=f"{TOKENS}, as `engine.trained_parameters` lists it"):
        engine.forward_backward(rows_of(0))
    handle.remove()
    engine.forward_backward(rows_of(0))
    with pytest.raises(OffloadError, match="still has the gradient of an earlier step"):
        engine.forward_backward(rows_of(1))
    engine.detach()
