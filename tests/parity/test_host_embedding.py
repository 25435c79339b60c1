"""The input embedding in host memory: its rows are brought, and no bit of a step differs."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

import offload
from finetune.adapter.lora import add_noise
from offload.engine.engine import Engine
from offload.engine.passes.part import RunStep
from offload.errors import UnsupportedModelError
from offload.plan.facts.workload import rows_bytes
from offload.plan.memory.memory import EMBEDDINGS, ROWS
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.schedule import Order
from tests.parity.objectives import ByRow, against_scored, pairs
from tests.parity.runs import assert_same, rows, together
from tests.parity.steps import (
    MODELS,
    OPTIONS,
    assert_equal,
    gradients,
    micro_batches,
    steps,
    tiny,
    with_lora,
)
from tests.parity.untied_models import (
    KINDS,
    exact_types,
    found_with,
    model_of,
    passes_with,
    scaled,
    step_of,
    trained_layers_with,
    untied,
)
from tests.tiers import mostly_slow, tiered

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = replace(OPTIONS, embeddings="host")
BOTH = (OPTIONS, HOST)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    mostly_slow(
        [(kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16)],
        ("qwen3_moe", torch.bfloat16),
        ("scaled", torch.float32),
        rest=pytest.mark.thorough,
    ),
)
def test_move_no_bit_differs_where_the_embedding_is_on_the_host(
    kind: str, dtype: torch.dtype
) -> None:
    model = model_of(kind)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    expected, plainly = steps(model, OPTIONS)
    actual, kinds = steps(model, HOST)
    assert_equal(actual, expected)
    assert not {Kind.LOOK_UP, Kind.ROWS} & set(plainly)
    assert kinds.count(Kind.LOOK_UP) == kinds.count(Kind.ROWS) == len(micro_batches())


def test_a_step_brings_each_row_once_and_no_other() -> None:
    """Counted without our own code: 8 bytes for a token, its row in fp32, and one more row."""
    model = copy.deepcopy(tiny("qwen3"))
    batches = micro_batches()
    engine = Engine(model, device=torch.device("cpu"), options=HOST)
    spans = engine.forward_backward(batches).timeline.spans
    engine.detach()
    distinct = [len(set(batch["input_ids"].flatten().tolist())) for batch in batches]
    expected = [-(-8 * num // 256) * 256 + (num + 1) * 32 * 4 for num in distinct]
    for kind, lane in ((Kind.LOOK_UP, Lane.HOST), (Kind.ROWS, Lane.H2D)):
        found = [span for span in spans if span.kind is kind]
        assert [span.num_bytes for span in found] == expected
        assert {span.lane for span in found} == {lane}
    assert max(distinct) < 2 * 16  # some token is there twice
    assert rows_bytes(distinct[0], 32 * 4) == expected[0]


def test_layers_get_what_the_embedding_itself_returns() -> None:
    """The reference is the model's own embedding, which multiplies, before it is attached."""
    torch.manual_seed(0)
    model = with_lora(scaled())
    ids = torch.tensor([[3, 9, 3, 63], [0, 1, 9, 9]])
    expected = model.get_input_embeddings()(ids)
    seen: list[torch.Tensor] = []
    base: Any = model.get_base_model()

    def record(_module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).detach().clone())

    base.model.layers[0].register_forward_pre_hook(record, with_kwargs=True)
    engine = offload.attach(model, num_slots=2, device="cpu", embeddings="host")
    seen.clear()
    engine.forward_backward([{"input_ids": ids, "labels": ids}])
    engine.detach()
    assert torch.equal(seen[-1], expected)
    assert torch.equal(expected, F.embedding(ids, base.model.embed_tokens.weight) * 32**0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"stash": "host", "num_sent_graphs": 1},
        pytest.param({"codec": "nf4"}, marks=pytest.mark.thorough),
        pytest.param({"num_kept_graphs": 2, "layer_kernels": "fused"}, marks=pytest.mark.thorough),
    ],
)
def test_move_no_bit_differs_with_other_settings(changes: dict[str, Any]) -> None:
    model = tiny("qwen3", dropout=0.2)
    expected, _ = steps(model, replace(OPTIONS, **changes))
    assert_equal(steps(model, replace(HOST, **changes))[0], expected)


def test_move_no_bit_differs_where_micro_batches_pass_one_after_the_other() -> None:
    assert_equal(*(step_of(tiny("llama"), one, order=Order.MICRO_BATCH_MAJOR) for one in BOTH))


def test_move_no_bit_differs_where_rows_are_packed() -> None:
    lens = ([5, 5], [3, 9, 4])  # equal rows, and others
    generator = torch.Generator().manual_seed(2)
    batches = []
    for one in lens:
        ids = torch.randint(0, 64, (1, sum(one)), generator=generator)
        batches.append({"input_ids": ids, "labels": ids, "row_lens": torch.tensor(one)})
    assert_equal(*(step_of(tiny("qwen3"), one, batches) for one in BOTH))


def test_move_noise_on_embeddings_is_the_same() -> None:
    model: Any = tiny("qwen3")
    add_noise(model.get_base_model(), alpha=5.0)
    assert_equal(*(step_of(model, one) for one in BOTH))


def test_move_preference_losses_are_the_same_with_reference_and_scored_rows() -> None:
    found = []
    kinds: list[Kind] = []
    for options in BOTH:
        model = copy.deepcopy(tiny("qwen3"))
        engine = Engine(model, device=torch.device("cpu"), options=options)
        batches = pairs(1, 2)
        objective = ByRow(against_scored, num_trained=6)
        one: dict[str, Any] = {"objective": objective, "scored": pairs(1, seed=7)}
        trained = engine.forward_backward(batches, dropout_seed=0, **one)
        kinds = [span.kind for span in trained.timeline.spans]
        evaluated = engine.evaluate(batches, **one)
        found.append((trained.loss, trained.metrics, evaluated.loss, gradients(model)))
        engine.detach()
    (loss, metrics, held_out, grads), (*own, own_grads) = found
    assert own == [loss, metrics, held_out]
    assert all(torch.equal(own_grads[name], grads[name]) for name in grads)
    assert kinds.count(Kind.ROWS) == kinds.count(Kind.FRONT) == 2 * 3  # model and reference


def test_move_weights_of_layers_that_train_on_the_host_have_the_same_bits() -> None:
    """Their updates run on the lane on which rows are gathered."""
    assert_equal(*map(trained_layers_with, BOTH))


def test_move_runs_that_share_a_step_are_what_they_are_alone() -> None:
    configs = ({"r": 4, "target_modules": ["q_proj"]}, {"r": 2, "target_modules": ["v_proj"]})
    runs = [RunStep(micro_batches=rows(i, 12, 9), dropout_seed=i) for i in range(2)]
    expected = together("qwen3", configs, runs)
    assert_same(together("qwen3", configs, runs, embeddings="host"), expected)


def test_move_passes_without_gradients_are_the_same() -> None:
    for one, other in zip(*map(passes_with, BOTH), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_an_attached_embedding_is_held_once_and_given_back() -> None:
    model: Any = tiny("qwen3")
    embedding = model.get_input_embeddings()
    weight, values = embedding.weight, embedding.weight.detach().clone()
    padded = torch.cat([values, values])  # as a store has it: a part of other memory
    weight.data = padded[: len(values)]
    engine = Engine(model, device=torch.device("cpu"), options=HOST)
    engine.forward_backward(micro_batches())
    sizes = {arena.name: arena.num_bytes for arena in engine.arenas}
    assert sizes[EMBEDDINGS] == values.nbytes
    num_rows = max(len(batch["input_ids"].unique()) for batch in micro_batches())
    assert sizes[ROWS] == 2 * rows_bytes(num_rows, 32 * 4)
    assert weight.untyped_storage().nbytes() == values.nbytes
    assert "forward" in vars(embedding)
    engine.detach()
    assert "forward" not in vars(embedding)
    assert embedding.weight is weight
    assert torch.equal(weight, values)
    assert torch.equal(embedding(torch.tensor([7, 7])), values[[7, 7]])


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "trained": (lambda: adapted(modules_to_save=["embed_tokens"]), "is ModulesToSaveWrapper"),
    "LoRA": (lambda: adapted("embed_tokens"), "is Embedding"),
    "tokens": (lambda: adapted(trainable_token_indices=[3]), "is TrainableTokensWrapper"),
    "unfrozen": (lambda: unfrozen(), "`model.embed_tokens` trains"),
    "max_norm": (lambda: with_max_norm(), "`model.embed_tokens` has a max_norm"),
    "forward": (lambda: with_own_forward(), "has another forward than Embedding"),
}


def adapted(*targets: str, **config: Any) -> nn.Module:
    adapter = LoraConfig(r=4, target_modules=["q_proj", *targets], **config)
    return get_peft_model(MODELS["qwen3"](), adapter)


def unfrozen() -> nn.Module:
    model: Any = tiny("qwen3")
    model.get_input_embeddings().weight.requires_grad_()
    return model


def with_max_norm() -> nn.Module:
    model: Any = tiny("qwen3")
    model.get_input_embeddings().max_norm = 1.0
    return model


def with_own_forward() -> nn.Module:
    model: Any = tiny("qwen3")
    embedding = model.get_input_embeddings()
    vars(embedding)["forward"] = lambda ids: F.embedding(ids, embedding.weight)
    return model


@pytest.mark.parametrize(("make", "what"), REFUSED.values(), ids=REFUSED)
def test_an_embedding_that_is_needed_on_the_device_is_refused_by_name(
    make: Callable[[], nn.Module], what: str
) -> None:
    model: Any = make()
    before = dict(vars(model.get_input_embeddings()))
    with pytest.raises(UnsupportedModelError, match=what) as refused:
        offload.attach(model, num_slots=2, device="cpu", embeddings="host")
    assert refused.value.hint == '`embeddings="device"`'
    assert vars(model.get_input_embeddings()) == before
    offload.attach(model, num_slots=2, device="cpu").detach()


# ---------------------------------------------------------------------------- each type of model


@pytest.mark.parametrize(
    "model_type", tiered(exact_types(), default=(), slow=("bloom", "gemma4_text", "opt", "rwkv"))
)
def test_move_each_type_of_model_has_the_same_bits(model_type: str) -> None:
    model = untied(model_type)
    assert_equal(*(found_with(model, one) for one in BOTH))
