"""One weight of embedding and head in host memory: held once, looked up there, copied for the head.

No bit of a step differs from that of the weight on the device.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import offload
from finetune.adapter.lora import add_noise
from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.passes.part import RunStep
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.memory.memory import EMBEDDINGS, HEAD, ROWS
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
    plain,
    rel_error,
    steps,
    with_lora,
)
from tests.parity.tied_models import KINDS, qwen3, tied, tied_of_type, wide
from tests.parity.untied_models import (
    exact_types,
    found_with,
    passes_with,
    step_of,
    trained_layers_with,
)
from tests.tiers import mostly_slow, tiered

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = replace(OPTIONS, embeddings="host", head="host")
BOTH = (OPTIONS, HOST)


def on_cpu(model: nn.Module, options: EngineOptions = HOST) -> Engine:
    return Engine(model, device=torch.device("cpu"), options=options)


@pytest.mark.parametrize("kind", ["gemma3_text", "capped"])
def test_gradients_are_those_of_plain_transformers(kind: str) -> None:
    """The reference is transformers and peft alone, in float64."""
    model: Any = tied(kind, dropout=0.0).double()
    loss, expected = plain(model)
    engine = on_cpu(model)
    result = engine.forward_backward(micro_batches())
    assert result.loss == pytest.approx(loss, rel=1e-6)  # of logits in fp32, as in transformers
    assert rel_error(gradients(model), expected) < 1e-6
    engine.detach()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    mostly_slow(
        [(kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16)],
        ("gemma3_text", torch.bfloat16),
        ("qwen3", torch.float32),
        rest=pytest.mark.thorough,
    ),
)
def test_move_no_bit_differs_where_the_weight_is_on_the_host(kind: str, dtype: torch.dtype) -> None:
    model = tied(kind)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    expected, plainly = steps(model, OPTIONS)
    actual, kinds = steps(model, HOST)
    assert_equal(actual, expected)
    assert not {Kind.LOOK_UP, Kind.ROWS, Kind.HEAD} & set(plainly)
    assert kinds.count(Kind.LOOK_UP) == kinds.count(Kind.ROWS) == len(micro_batches())
    assert kinds.count(Kind.HEAD) == 1


@pytest.mark.parametrize(
    ("num_tokens", "num_slots"),
    [
        (400, 3),
        (1000, 2),
        *(
            pytest.param(num_tokens, num_slots, marks=pytest.mark.thorough)
            for num_tokens in (64, 333, 400, 1000)
            for num_slots in (2, 3, 4)
        ),
    ],
)
def test_move_no_bit_differs_where_the_table_is_wider_than_a_slot(
    num_tokens: int, num_slots: int
) -> None:
    """A layer takes 40 KiB. What is copied is the table once, however many slots it covers."""
    model = wide(num_tokens, dropout=0.2)
    options = [replace(one, num_slots=num_slots) for one in BOTH]
    assert_equal(*(step_of(model, one) for one in options))
    own = copy.deepcopy(model)
    engine = on_cpu(own, options[1])
    spans = engine.forward_backward(micro_batches(), dropout_seed=0).timeline.spans
    copies = [span for span in spans if span.kind is Kind.HEAD]
    assert sum(span.num_bytes for span in copies) == num_tokens * 32 * 4
    assert {span.lane for span in copies} == {Lane.H2D}
    engine.detach()


@pytest.mark.parametrize(
    "changes",
    [
        {"stash": "host", "num_sent_graphs": 1},
        {"num_kept_graphs": 4, "num_slots": 3},
        {"num_slots": 4},
        pytest.param({"codec": "nf4"}, marks=pytest.mark.thorough),
        pytest.param({"codec": "bf16_packed"}, marks=pytest.mark.thorough),
        pytest.param({"num_kept_graphs": 2, "layer_kernels": "fused"}, marks=pytest.mark.thorough),
        pytest.param({"tier": "disk"}, marks=pytest.mark.thorough),
    ],
)
def test_move_no_bit_differs_with_other_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    if changes.get("tier") == "disk":
        changes = changes | {"store_dir": tmp_path}
    model = wide()
    if changes.get("codec") == "bf16_packed":
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    assert_equal(*(step_of(model, replace(one, **changes)) for one in BOTH))


def test_move_no_bit_differs_where_micro_batches_pass_one_after_the_other() -> None:
    assert_equal(*(step_of(wide(), one, order=Order.MICRO_BATCH_MAJOR) for one in BOTH))


def test_move_no_bit_differs_where_rows_are_packed() -> None:
    generator = torch.Generator().manual_seed(2)
    batches = []
    for one in ([5, 5], [3, 9, 4]):  # equal rows, and others
        ids = torch.randint(0, 64, (1, sum(one)), generator=generator)
        batches.append({"input_ids": ids, "labels": ids, "row_lens": torch.tensor(one)})
    assert_equal(*(step_of(tied("gemma3_text"), one, batches) for one in BOTH))


def test_move_noise_on_embeddings_is_the_same() -> None:
    model: Any = tied("gemma3_text")
    add_noise(model.get_base_model(), alpha=5.0)
    assert_equal(*(step_of(model, one) for one in BOTH))


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_move_gradients_of_an_adapter_on_the_head_are_the_same() -> None:
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    model = get_peft_model(qwen3(400), adapter).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    found = [step_of(model, one) for one in BOTH]
    assert_equal(*found)
    assert any("lm_head" in name for name in found[0][1])


def test_move_preference_losses_are_the_same_with_reference_and_scored_rows() -> None:
    found, kinds = [], []
    for options in BOTH:
        model: Any = wide()
        torch.manual_seed(1)
        nn.init.normal_(model.get_base_model().lm_head.weight, std=0.1)
        engine = on_cpu(model, options)
        batches = pairs(1, 2)
        one: dict[str, Any] = {
            "objective": ByRow(against_scored, num_trained=6),
            "scored": pairs(1, seed=7),
        }
        trained = engine.forward_backward(batches, dropout_seed=0, **one)
        kinds = [span.kind for span in trained.timeline.spans]
        evaluated = engine.evaluate(batches, **one)
        found.append((trained.loss, trained.metrics, evaluated.loss, gradients(model)))
        engine.detach()
    (loss, metrics, held_out, grads), (*own, own_grads) = found
    assert own == [loss, metrics, held_out]
    assert all(torch.equal(own_grads[name], grads[name]) for name in grads)
    assert kinds.count(Kind.ROWS) == kinds.count(Kind.FRONT) == 2 * 3  # model and reference
    assert kinds.count(Kind.HEAD) == 2  # for all passes: a piece for each of two slots


def test_move_weights_of_layers_that_train_on_the_host_have_the_same_bits() -> None:
    """Their updates run on the lane on which rows are gathered, and the table is frozen."""
    assert_equal(*(trained_layers_with(one, qwen3) for one in BOTH))


def test_move_runs_that_share_a_step_are_what_they_are_alone() -> None:
    configs = ({"r": 4, "target_modules": ["q_proj"]}, {"r": 2, "target_modules": ["v_proj"]})
    runs = [RunStep(micro_batches=rows(i, 12, 9), dropout_seed=i) for i in range(2)]
    expected = together("gemma3_text", configs, runs)
    assert_same(together("gemma3_text", configs, runs, embeddings="host", head="host"), expected)


@pytest.mark.parametrize("kind", ["qwen3", "capped"])
def test_move_passes_without_gradients_are_the_same(kind: str) -> None:
    found = (passes_with(one, tied(kind, dropout=0.0)) for one in BOTH)
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


# ----------------------------------------------------------------------- where it is, and how often


class Reads(TorchFunctionMode):
    """Notes what a weight refers to where something is computed with it, and what is looked up."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight
        self.addresses: list[int] = []
        self.looked_up: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and not kwargs.get("out"):
            self.looked_up.append(args[1].untyped_storage().data_ptr())
        elif func is F.linear and any(x is self._weight for x in (*args, *kwargs.values())):
            self.addresses.append(self._weight.data_ptr())
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "model_type",
    tiered(exact_types(), default=("gemma2",), slow=("bloom", "gemma4_text", "opt", "gpt2")),
)
def test_the_head_computes_on_the_device_and_lookups_are_never_in_what_it_computes_with(
    model_type: str,
) -> None:
    """On a GPU a product with the weight on the host would fail, and a lookup read half a copy."""
    model: Any = tied_of_type(model_type)
    engine = on_cpu(model)
    head = engine._bound.places.head
    assert head is not None
    assert head._on_device is not None
    with Reads(head.weight) as reads:
        engine.forward_backward(micro_batches(), order=Order.MICRO_BATCH_MAJOR)
        model.eval()
        ids = micro_batches()[0]["input_ids"]
        with suppress(UnsupportedModelError):  # some types only train
            engine.forward({"input_ids": ids})
            with engine.generation() as generation:
                for _ in range(2):
                    generation.next_logits({0: ids[:1, :4]})
    slots = head._on_device.untyped_storage().data_ptr()
    engine.detach()
    assert len(reads.addresses) >= len(micro_batches())
    assert set(reads.addresses) == {head._on_device.data_ptr()}
    assert reads.looked_up
    assert slots not in reads.looked_up


def test_a_lookup_reads_the_host_while_the_head_has_the_weight_on_the_device() -> None:
    """Rows of one pass are gathered by a thread while the head of another computes."""
    model = wide()
    engine = on_cpu(model)
    embedding, head = engine._layered.embedding, engine._bound.places.head
    assert embedding is not None
    assert head is not None
    assert head._on_device is not None
    values = head.weight.detach().clone()
    ids = torch.tensor([[3, 399, 3]])
    (num_bytes,) = embedding.prepare({0: ids})
    op = engine._schedule(
        engine._parts([RunStep(micro_batches=micro_batches(1))], is_trained=True),
        ring=engine._ring,
        order=Order.LAYER_MAJOR,
    ).ops[0]
    assert op.kind is Kind.LOOK_UP
    embedding.prepare({0: ids})
    head._on_device.fill_(0xFF)  # a copy that is under way, or another layer
    with head.present():
        embedding.look_up(op._replace(num_bytes=num_bytes))
        found = model.get_input_embeddings()(ids)
    _, rows_ND = embedding._views(embedding._rows.place(0, op.buffer_index), 2)
    assert torch.equal(rows_ND[1:], values[[3, 399]])
    assert torch.equal(found, values[ids])
    engine.detach()


def test_between_passes_the_weight_has_its_values_and_is_held_once() -> None:
    model: Any = wide()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight, values = embedding.weight, embedding.weight.detach().clone()
    engine = on_cpu(model)
    engine.forward_backward(micro_batches())
    arenas = {arena.name: arena for arena in engine.arenas}
    assert EMBEDDINGS not in arenas
    assert arenas[HEAD].num_bytes == values.nbytes
    assert arenas[ROWS].num_bytes > 0
    blocks = {block.untyped_storage().data_ptr() for block in arenas[HEAD].blocks}
    assert blocks == {weight.untyped_storage().data_ptr()}
    assert embedding.weight is head.weight is weight
    state = model.get_base_model().state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(state[name], values)
        assert state[name].data_ptr() == weight.data_ptr()
    engine.detach()
    assert embedding.weight is head.weight is weight
    assert torch.equal(weight, values)
    assert "forward" not in vars(embedding)
    assert torch.equal(embedding(torch.tensor([7, 7])), values[[7, 7]])


def test_values_that_are_written_to_the_weight_are_those_of_the_next_step() -> None:
    model: Any = wide()
    engine = on_cpu(model)
    engine.forward_backward(micro_batches(), dropout_seed=0)
    other = torch.randn(400, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.get_base_model().lm_head.weight.copy_(other)
    model.zero_grad()
    loss = engine.forward_backward(micro_batches(), dropout_seed=0).loss
    found = loss, gradients(model)
    engine.detach()
    assert torch.equal(model.get_base_model().lm_head.weight, other)
    assert_equal(found, step_of(model, OPTIONS))


def test_a_weight_that_was_given_other_memory_is_refused() -> None:
    """What is copied to the device is what was page-locked."""
    model: Any = wide()
    engine = on_cpu(model)
    weight = model.get_base_model().lm_head.weight
    kept = weight.data
    weight.data = kept.clone()
    with pytest.raises(OffloadError, match=r"embed_tokens\.weight` was given other") as refused:
        engine.forward_backward(micro_batches())
    assert "`weight.copy_(...)`" in str(refused.value.hint)
    weight.data = kept
    model.zero_grad()
    found = engine.forward_backward(micro_batches(), dropout_seed=0).loss, gradients(model)
    engine.detach()
    assert_equal(found, step_of(model, OPTIONS))


def test_the_weight_has_its_values_where_an_op_of_the_head_fails() -> None:
    model: Any = tied("qwen3")
    head = model.get_base_model().lm_head
    values = head.weight.detach().clone()
    engine = on_cpu(model)
    expected = engine.forward_backward(micro_batches(), dropout_seed=0).loss

    def fail(_module: nn.Module, _args: Any, _output: Any) -> None:
        raise OverflowError("of the head")

    hook = head.register_forward_hook(fail)
    with pytest.raises(OverflowError, match="of the head"):
        engine.forward({"input_ids": micro_batches()[0]["input_ids"]})
    hook.remove()
    assert torch.equal(head.weight, values)
    assert torch.equal(model.get_input_embeddings()(torch.tensor([5])), values[[5]])
    assert engine.forward_backward(micro_batches(), dropout_seed=0).loss == expected
    engine.detach()


# ---------------------------------------------------------------------------------- what is refused


def with_third_user() -> nn.Module:
    model: Any = tied("qwen3")
    base = model.get_base_model()
    base.other = nn.Linear(32, 64, bias=False)
    base.other.weight = base.lm_head.weight
    return model


def unfrozen() -> nn.Module:
    model: Any = tied("qwen3")
    model.get_output_embeddings().weight.requires_grad_()
    return model


def copied() -> nn.Module:
    config = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    )
    return get_peft_model(qwen3(), config)


def with_tokens() -> nn.Module:
    return get_peft_model(
        qwen3(), LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3])
    )


def of_embedding() -> nn.Module:
    return get_peft_model(qwen3(), LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))


def with_max_norm() -> nn.Module:
    model: Any = tied("qwen3")
    model.get_input_embeddings().max_norm = 1.0
    return model


PAIR: dict[str, Any] = {"embeddings": "host", "head": "host"}
ON_DEVICE = '`head="device"` with `embeddings="device"`'
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    "head alone": (
        lambda: with_lora(MODELS["gemma3_text"]()),
        {"head": "host"},
        "`model.embed_tokens` has the same weight as `lm_head`; a weight of both is in one place",
        '`embeddings="host"` too, or `head="device"`',
    ),
    "embedding alone": (
        lambda: with_lora(MODELS["gemma3_text"]()),
        {"embeddings": "host"},
        "`lm_head` has the same weight as `model.embed_tokens`; a weight of both is in one place",
        '`head="host"` too, or `embeddings="device"`',
    ),
    "third user": (with_third_user, PAIR, "`other` has the same weight as `lm_head`", ON_DEVICE),
    "third user, head alone": (
        with_third_user,
        {"head": "host"},
        "`other` has the same weight as `lm_head`",
        '`head="device"`',
    ),
    "third user, embedding alone": (
        with_third_user,
        {"embeddings": "host"},
        "`other` has the same weight as `model.embed_tokens`",
        '`embeddings="device"`',
    ),
    "trained": (
        unfrozen,
        PAIR,
        "`lm_head` trains; a head in host memory is frozen",
        ON_DEVICE,
    ),
    "trained with layers": (
        unfrozen,
        PAIR | {"trained_weights": "host"},
        "`lm_head` trains; a head in host memory is frozen",
        ON_DEVICE,
    ),
    "copied": (copied, PAIR, "`lm_head` is ModulesToSaveWrapper", ON_DEVICE),
    "tokens": (with_tokens, PAIR, "`lm_head` is TrainableTokensWrapper", ON_DEVICE),
    "adapted": (
        of_embedding,
        PAIR,
        "`model.embed_tokens.base_layer` has the same weight as `lm_head`",
        ON_DEVICE,
    ),
    "max_norm": (
        with_max_norm,
        PAIR,
        "`model.embed_tokens` has a max_norm",
        '`embeddings="device"` with `head="device"`',
    ),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(("make", "options", "what", "hint"), REFUSED.values(), ids=REFUSED)
def test_a_weight_that_is_needed_on_the_device_is_refused_by_name(
    make: Callable[[], nn.Module], options: dict[str, Any], what: str, hint: str
) -> None:
    model: Any = make()
    with pytest.raises(UnsupportedModelError) as refused:
        offload.attach(model, num_slots=2, device="cpu", **options)
    assert what in str(refused.value)
    assert refused.value.hint == hint
    assert "forward" not in vars(model.get_input_embeddings())
    kept = {"trained_weights": options["trained_weights"]} if "trained_weights" in options else {}
    offload.attach(model, num_slots=2, device="cpu", **kept).detach()


# ---------------------------------------------------------------------------- each type of model


@pytest.mark.parametrize(
    "model_type", tiered(exact_types(), default=(), slow=("bloom", "gemma4_text", "opt", "gpt2"))
)
def test_move_each_type_of_model_has_the_same_bits(model_type: str) -> None:
    model = tied_of_type(model_type)
    assert_equal(*(found_with(model, one) for one in BOTH))
