"""Embedding and head in host memory: no bit of a step differs.

The embedding's rows are brought, the head computes in the slots of layers, and a weight of both is
held once.
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
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

import offload
from finetune.adapter.lora import add_noise
from offload.engine.engine import Engine, EngineOptions
from offload.engine.host.weights import LayerUpdate
from offload.engine.model.layers import LayeredModel
from offload.engine.passes.part import RunStep
from offload.errors import OffloadError, UnsupportedModelError
from offload.plan.facts.workload import rows_bytes
from offload.plan.memory.memory import EMBEDDINGS, HEAD, ROWS
from offload.plan.schedule.op import Kind, Lane
from offload.plan.schedule.schedule import Order
from tests.parity.architectures import exact_types, rel_error
from tests.parity.objectives import ByRow, against_scored, pairs
from tests.parity.runs import assert_same, rows, together
from tests.parity.steps import (
    LAYER_TYPES,
    MODELS,
    OPTIONS,
    SHAPE,
    assert_equal,
    gradients,
    micro_batches,
    plain,
    steps,
    tiny,
    with_lora,
    with_outputs,
)
from tests.parity.tied_models import (
    TIED,
    drawn,
    learned_positions,
    qwen3,
    tied,
    tied_by_hand,
    wide,
    with_projections,
)
from tests.parity.tiny_models import tiny_model, with_adapters
from tests.tiers import mostly_slow, tiered

pytestmark = pytest.mark.usefixtures("one_thread")


def scaled() -> PreTrainedModel:
    """Return a model whose embedding multiplies what it looks up, and is not the head's."""
    config = Gemma3TextConfig(
        **SHAPE, sliding_window=8, layer_types=LAYER_TYPES, tie_word_embeddings=False
    )
    return Gemma3ForCausalLM(config)


UNTIED: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": MODELS["qwen3"],
    "qwen3_moe": MODELS["qwen3_moe"],
    "scaled": scaled,
    "learned_positions": learned_positions,
}


def untied(kind: str) -> Any:
    torch.manual_seed(0)
    base = UNTIED[kind]()
    return with_projections(base) if kind == "learned_positions" else with_lora(base, dropout=0.2)


def untied_of_type(model_type: str) -> nn.Module:
    """Return a tiny model of a type with adapters, and a head of its own."""
    model: Any = tiny_model(model_type)
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return with_adapters(model, LayeredModel(model).layers)


def tied_of_type(model_type: str) -> nn.Module:
    """Return a tiny model of a type with adapters, and one weight for embedding and head."""
    model: Any = tiny_model(model_type)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight:
        if head.weight.shape != embedding.weight.shape:
            pytest.skip("its head and its embedding have different shapes")
        tied_by_hand(model)
    return with_adapters(model, LayeredModel(model).layers)


def step_of(
    model: nn.Module,
    options: EngineOptions,
    batches: list[dict[str, torch.Tensor]] | None = None,
    **changes: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a step."""
    model = copy.deepcopy(model)
    engine = Engine(model, device=torch.device("cpu"), options=options)
    try:
        result = engine.forward_backward(batches or micro_batches(), dropout_seed=0, **changes)
        return result.loss, gradients(model)  # type: ignore[arg-type]
    finally:
        engine.detach()


def found_with(model: nn.Module, options: EngineOptions) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a step, and the gradients of what it reaches."""
    own = copy.deepcopy(model)
    engine = Engine(own, device=torch.device("cpu"), options=options)
    loss = engine.forward_backward(micro_batches(), dropout_seed=0).loss
    grads = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    engine.detach()
    return loss, grads


def trained_layers_with(
    options: EngineOptions, make: Callable[[], PreTrainedModel] = MODELS["qwen3"]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return a loss and the layers' weights after three steps in which these train on the host."""

    def update(one: LayerUpdate) -> None:
        for name, weight in one.weights.items():
            weight.sub_(0.1 * one.gradients[name])

    torch.manual_seed(0)
    model: Any = make().train().requires_grad_(requires_grad=False)
    model.model.layers.requires_grad_()
    options = replace(options, trained_weights="host")
    engine = Engine(model, device=torch.device("cpu"), options=options)
    losses = []
    for _ in range(3):
        losses.append(engine.forward_backward(micro_batches()).loss)
        engine.updates.defer(update)
        for weight in engine._bound.places.host_gradients.parameters.values():
            weight.grad = None
    assert losses[2] < losses[0]
    weights = {n: w.detach().clone() for n, w in engine.trained_parameters.items()}
    engine.detach()
    return losses[2], weights


def passes_with(options: EngineOptions, model: Any = None) -> list[Any]:
    """Return losses and logits of a batch, scores, the model's own logits, and generated ones."""
    batches = micro_batches()
    model = copy.deepcopy(tiny("qwen3") if model is None else model).eval()
    engine = Engine(model, device=torch.device("cpu"), options=options)
    rest = {name: value for name, value in batches[1].items() if name != "labels"}
    answers = [engine.forward(batches[0]).loss_sum, engine.forward(rest).logits]
    scores = engine.score(batches, adapters=[None, "default"]).scores
    answers += [tokens.logps_N for adapter in scores for tokens in adapter]
    with torch.no_grad():
        answers.append(model(input_ids=batches[2]["input_ids"]).logits)
    with engine.generation() as generation:
        ids = torch.tensor([[3, 5, 7, 9]])
        for _ in range(3):
            logits_BV = generation.next_logits({0: ids})[0]
            answers.append(logits_BV)
            ids = logits_BV.argmax(-1, keepdim=True)
    engine.detach()
    return answers


EMBEDDING = replace(OPTIONS, embeddings="host")
HEAD_ALONE = replace(OPTIONS, head="host")
TIED_WEIGHT = replace(OPTIONS, embeddings="host", head="host")
HOST = {"embedding": EMBEDDING, "head": HEAD_ALONE, "tied": TIED_WEIGHT}
TINY: dict[str, Callable[[], Any]] = {
    "embedding": lambda: tiny("qwen3"),
    "head": lambda: with_outputs(tiny("qwen3"), 400),
    "tied": lambda: wide(),
}
"""A model for each; of 400 tokens a head is wider than a slot of 40 KiB."""
each = pytest.mark.parametrize("what", HOST)


def on_cpu(model: nn.Module, options: EngineOptions = TIED_WEIGHT) -> Engine:
    return Engine(model, device=torch.device("cpu"), options=options)


def assert_same_step(what: str, model: nn.Module, *args: Any, **changes: Any) -> None:
    assert_equal(*(step_of(model, one, *args, **changes) for one in (OPTIONS, HOST[what])))


# -------------------------------------------------------------- a step, its parts, and its settings


@pytest.mark.parametrize(
    ("what", "kind", "dtype"),
    mostly_slow(
        [
            (what, kind, dtype)
            for what in HOST
            for kind in (TIED if what == "tied" else UNTIED)
            for dtype in (torch.float32, torch.bfloat16)
        ],
        ("embedding", "qwen3_moe", torch.bfloat16),
        ("embedding", "scaled", torch.float32),
        ("head", "qwen3_moe", torch.bfloat16),
        ("head", "scaled", torch.float32),
        ("tied", "gemma3_text", torch.bfloat16),
        ("tied", "qwen3", torch.float32),
        rest=pytest.mark.thorough,
    ),
)
def test_move_no_bit_differs_where_it_is_on_the_host(
    what: str, kind: str, dtype: torch.dtype
) -> None:
    model = tied(kind) if what == "tied" else untied(kind)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    expected, plainly = steps(model, OPTIONS)
    actual, kinds = steps(model, HOST[what])
    assert_equal(actual, expected)
    assert not {Kind.LOOK_UP, Kind.ROWS, Kind.HEAD} & set(plainly)
    num_looked_up = 0 if what == "head" else len(micro_batches())
    assert kinds.count(Kind.LOOK_UP) == kinds.count(Kind.ROWS) == num_looked_up
    assert kinds.count(Kind.HEAD) == (what != "embedding")


@pytest.mark.parametrize(
    ("what", "num_tokens", "num_slots"),
    mostly_slow(
        [
            (what, num_tokens, num_slots)
            for what in ("head", "tied")
            for num_tokens in (64, 333, 400, 1000)
            for num_slots in (2, 3, 4)
        ],
        *((what, *sizes) for what in ("head", "tied") for sizes in ((400, 3), (1000, 2))),
        rest=pytest.mark.thorough,
    ),
)
def test_move_no_bit_differs_where_the_head_is_wider_than_a_slot(
    what: str, num_tokens: int, num_slots: int
) -> None:
    """Slots are counted without our own code, from the bytes of the parameters."""
    torch.manual_seed(0)
    model: Any = (
        wide(num_tokens, dropout=0.2)
        if what == "tied"
        else with_outputs(tiny("qwen3", dropout=0.2), num_tokens)
    )
    options = [replace(one, num_slots=num_slots) for one in (OPTIONS, HOST[what])]
    assert_equal(*(step_of(model, one) for one in options))
    layers = model.get_base_model().model.layers
    slot_bytes = max(
        sum(p.nbytes for p in layer.parameters() if not p.requires_grad) for layer in layers
    )
    num_bytes = num_tokens * 32 * 4
    engine = on_cpu(copy.deepcopy(model), options[1])
    result = engine.forward_backward(micro_batches(), dropout_seed=0)
    spans = [span for span in result.timeline.spans if span.kind is Kind.HEAD]
    assert sum(span.num_bytes for span in spans) == num_bytes
    assert {span.lane for span in spans} == {Lane.H2D}
    covered = min(num_slots, -(-num_bytes // slot_bytes))  # a record has less than a page to spare
    assert len(spans) == covered
    assert engine.slot_bytes >= num_bytes
    engine.detach()


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "sent graphs": ({"stash": "host", "num_sent_graphs": 1}, "embedding head tied"),
    "kept graphs": ({"num_kept_graphs": 4, "num_slots": 3}, "head tied"),
    "slots": ({"num_slots": 4}, "tied"),
    "embedding too": ({"embeddings": "host"}, "head"),
    "nf4": ({"codec": "nf4"}, "embedding head tied"),
    "bf16_packed": ({"codec": "bf16_packed"}, "tied"),
    "fused": ({"num_kept_graphs": 2, "layer_kernels": "fused"}, "embedding head tied"),
    "disk": ({"tier": "disk"}, "head tied"),
}
"""Settings of a step, and with what they are tried."""


@pytest.mark.parametrize(
    ("what", "setting"),
    mostly_slow(
        [(what, setting) for setting, (_, those) in SETTINGS.items() for what in those.split()],
        *((what, "sent graphs") for what in HOST),
        ("head", "kept graphs"),
        ("head", "embedding too"),
        ("tied", "kept graphs"),
        ("tied", "slots"),
        rest=pytest.mark.thorough,
    ),
)
def test_move_no_bit_differs_with_other_settings(what: str, setting: str, tmp_path: Path) -> None:
    changes, _ = SETTINGS[setting]
    if setting == "disk":
        changes = changes | {"store_dir": tmp_path}
    makers: dict[str, Callable[[], Any]] = {
        "embedding": lambda: tiny("qwen3", dropout=0.2),
        "head": lambda: with_outputs(tiny("qwen3", dropout=0.2), 400),
        "tied": wide,
    }
    model = makers[what]()
    if setting == "bf16_packed":
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    assert_equal(*(step_of(model, replace(one, **changes)) for one in (OPTIONS, HOST[what])))


@each
def test_move_no_bit_differs_where_micro_batches_pass_one_after_the_other(what: str) -> None:
    assert_same_step(what, TINY[what](), order=Order.MICRO_BATCH_MAJOR)


@each
def test_move_no_bit_differs_where_rows_are_packed(what: str) -> None:
    generator = torch.Generator().manual_seed(2)
    batches = []
    for lens in ([5, 5], [3, 9, 4]):  # equal rows, and others
        ids = torch.randint(0, 64, (1, sum(lens)), generator=generator)
        batches.append({"input_ids": ids, "labels": ids, "row_lens": torch.tensor(lens)})
    assert_same_step(what, tied("gemma3_text") if what == "tied" else tiny("qwen3"), batches)


@pytest.mark.parametrize("what", ["embedding", "tied"])
def test_move_noise_on_embeddings_is_the_same(what: str) -> None:
    model: Any = tied("gemma3_text") if what == "tied" else tiny("qwen3")
    add_noise(model.get_base_model(), alpha=5.0)
    assert_same_step(what, model)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("what", ["head", "tied"])
def test_move_gradients_of_an_adapter_on_the_head_are_the_same(what: str) -> None:
    torch.manual_seed(0)
    base = qwen3(400) if what == "tied" else MODELS["qwen3"]()
    model = drawn(get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "lm_head"])))
    assert_same_step(what, model)
    assert any("lm_head" in name for name in step_of(model, OPTIONS)[1])


@each
def test_move_preference_losses_are_the_same_with_reference_and_scored_rows(what: str) -> None:
    found = []
    kinds: list[Kind] = []
    for options in (OPTIONS, HOST[what]):
        model: Any = copy.deepcopy(TINY[what]())
        torch.manual_seed(1)
        nn.init.normal_(model.get_base_model().lm_head.weight, std=0.1)
        engine = on_cpu(model, options)
        batches = pairs(1, 2)
        objective = ByRow(against_scored, num_trained=6)
        more: dict[str, Any] = {"objective": objective, "scored": pairs(1, seed=7)}
        trained = engine.forward_backward(batches, dropout_seed=0, **more)
        kinds = [span.kind for span in trained.timeline.spans]
        evaluated = engine.evaluate(batches, **more)
        found.append((trained.loss, trained.metrics, evaluated.loss, gradients(model)))
        engine.detach()
    (loss, metrics, held_out, grads), (*own, own_grads) = found
    assert own == [loss, metrics, held_out]
    assert all(torch.equal(own_grads[name], grads[name]) for name in grads)
    assert kinds.count(Kind.FRONT) == 2 * 3  # model and reference
    assert kinds.count(Kind.ROWS) == (0 if what == "head" else 2 * 3)
    # for all passes: a piece for each of two slots
    assert kinds.count(Kind.HEAD) == (0 if what == "embedding" else 2)


@each
def test_move_weights_of_layers_that_train_on_the_host_have_the_same_bits(what: str) -> None:
    """Their updates run on the lane on which rows are gathered, and a table is frozen.

    A layer under the head is loaded again within a step, before its update.
    """
    make = qwen3 if what == "tied" else MODELS["qwen3"]
    assert_equal(*(trained_layers_with(one, make) for one in (OPTIONS, HOST[what])))


@each
def test_move_runs_that_share_a_step_are_what_they_are_alone(what: str) -> None:
    configs = ({"r": 4, "target_modules": ["q_proj"]}, {"r": 2, "target_modules": ["v_proj"]})
    runs = [RunStep(micro_batches=rows(i, 12, 9), dropout_seed=i) for i in range(2)]
    kind = "gemma3_text" if what == "tied" else "qwen3"
    places: dict[str, Any] = {"embeddings": HOST[what].embeddings, "head": HOST[what].head}
    assert_same(together(kind, configs, runs, **places), together(kind, configs, runs))


@pytest.mark.parametrize(
    ("what", "kind"), [("embedding", ""), ("head", ""), ("tied", "qwen3"), ("tied", "capped")]
)
def test_move_passes_without_gradients_are_the_same(what: str, kind: str) -> None:
    model = tied(kind, dropout=0.0) if kind else tiny("qwen3")
    found = (passes_with(options, model) for options in (OPTIONS, HOST[what]))
    for ours, truth in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(truth))


@pytest.mark.parametrize(
    ("what", "model_type"),
    [
        *tiered(
            [(what, kind) for what in ("embedding", "head") for kind in exact_types()],
            default=(),
            slow=tuple(
                (what, kind)
                for what in ("embedding", "head")
                for kind in ("bloom", "gemma4_text", "opt", "rwkv")
            ),
        ),
        *tiered(
            [("tied", kind) for kind in exact_types()],
            default=(),
            slow=tuple(("tied", kind) for kind in ("bloom", "gemma4_text", "opt", "gpt2")),
        ),
    ],
)
def test_move_each_type_of_model_has_the_same_bits(what: str, model_type: str) -> None:
    model = (tied_of_type if what == "tied" else untied_of_type)(model_type)
    assert_equal(*(found_with(model, one) for one in (OPTIONS, HOST[what])))


# ------------------------------------------------------------------------------------ the embedding


def test_a_step_brings_each_row_once_and_no_other() -> None:
    """Counted without our own code: 8 bytes for a token, its row in fp32, and one more row."""
    model = copy.deepcopy(tiny("qwen3"))
    batches = micro_batches()
    engine = on_cpu(model, EMBEDDING)
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


def test_an_attached_embedding_is_held_once_and_given_back() -> None:
    model: Any = tiny("qwen3")
    embedding = model.get_input_embeddings()
    weight, values = embedding.weight, embedding.weight.detach().clone()
    padded = torch.cat([values, values])  # as a store has it: a part of other memory
    weight.data = padded[: len(values)]
    engine = on_cpu(model, EMBEDDING)
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


# ----------------------------------------------------------------------------------------- the head


OF_ITS_FORM = ("__get__", "__set__", "__len__", "data_ptr", "size", "dim")


class Reads(TorchFunctionMode):
    """Notes where a weight is when something is computed with it, and what is looked up."""

    def __init__(self, weight: torch.Tensor, *, is_tied: bool) -> None:
        super().__init__()
        self._weight, self._is_tied = weight, is_tied
        self.addresses: list[int] = []
        self.looked_up: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_product = func is F.linear if self._is_tied else func.__name__ not in OF_ITS_FORM
        if func is F.embedding and not kwargs.get("out"):
            self.looked_up.append(args[1].untyped_storage().data_ptr())
        elif is_product and any(x is self._weight for x in (*args, *kwargs.values())):
            self.addresses.append(self._weight.data_ptr())
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("what", "model_type"),
    [
        *tiered(
            [("head", kind) for kind in exact_types()],
            default=(("head", "qwen3"),),
            slow=tuple(("head", kind) for kind in ("bloom", "gemma4_text", "opt", "rwkv")),
        ),
        *tiered(
            [("tied", kind) for kind in exact_types()],
            default=(("tied", "gemma2"),),
            slow=tuple(("tied", kind) for kind in ("bloom", "gemma4_text", "opt", "gpt2")),
        ),
    ],
)
def test_the_head_computes_on_the_device_and_lookups_are_never_in_what_it_computes_with(
    what: str, model_type: str
) -> None:
    """On a GPU a product with the weight on the host would fail, and a lookup read half a copy."""
    model: Any = (tied_of_type if what == "tied" else untied_of_type)(model_type)
    engine = on_cpu(model, HOST[what])
    head = engine._bound.places.head
    assert head is not None
    assert head._on_device is not None
    order = Order.MICRO_BATCH_MAJOR if what == "tied" else Order.LAYER_MAJOR
    with Reads(head.weight, is_tied=what == "tied") as reads:
        engine.forward_backward(micro_batches(), order=order)
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
    assert slots not in reads.looked_up
    assert reads.looked_up or what == "head"


def test_the_logits_are_those_of_the_plain_model() -> None:
    """The reference is transformers alone, before the model is attached."""
    model: Any = with_outputs(tiny("qwen3"), 400).eval()
    ids = micro_batches()[0]["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    engine = offload.attach(model, num_slots=2, device="cpu", head="host")
    found = engine.forward({"input_ids": ids}).logits
    assert found is not None
    assert torch.equal(found, expected)
    engine.detach()


def test_between_passes_the_weight_has_its_values_and_is_held_once_on_the_host() -> None:
    model: Any = with_outputs(tiny("qwen3"), 400)
    weight = model.get_base_model().lm_head.weight
    values = weight.detach().clone()
    engine = on_cpu(model, HEAD_ALONE)
    engine.forward_backward(micro_batches())
    (arena,) = (arena for arena in engine.arenas if arena.name == HEAD)
    assert arena.num_bytes == values.nbytes == weight.untyped_storage().nbytes()
    slots = [block for arena in engine.arenas if arena.name == "slots" for block in arena.blocks]
    (memory,) = slots
    start = memory.data_ptr()
    assert not start <= weight.data_ptr() < start + memory.nbytes
    assert torch.equal(weight, values)
    assert torch.equal(model.get_base_model().state_dict()["lm_head.weight"], values)
    engine.detach()
    assert model.get_base_model().lm_head.weight is weight
    assert torch.equal(weight, values)


@pytest.mark.parametrize("what", ["head", "tied"])
def test_the_weight_has_its_values_where_an_op_of_the_head_fails(what: str) -> None:
    model: Any = tied("qwen3") if what == "tied" else tiny("qwen3")
    head = model.get_base_model().lm_head
    values = head.weight.detach().clone()
    engine = on_cpu(model, HOST[what])
    expected = engine.forward_backward(micro_batches(), dropout_seed=0).loss

    def fail(_module: nn.Module, _args: Any, _output: Any) -> None:
        raise OverflowError("of the head")

    hook = head.register_forward_hook(fail)
    with pytest.raises(OverflowError, match="of the head"):
        engine.forward({"input_ids": micro_batches()[0]["input_ids"]})
    hook.remove()
    assert torch.equal(head.weight, values)
    if what == "tied":
        assert torch.equal(model.get_input_embeddings()(torch.tensor([5])), values[[5]])
    assert engine.forward_backward(micro_batches(), dropout_seed=0).loss == expected
    engine.detach()


# --------------------------------------------------------------------------------- a weight of both


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


def test_between_passes_the_weight_of_both_has_its_values_and_is_held_once() -> None:
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


# ---------------------------------------------------------------------------------- what is refused


def adapted(*targets: str, **config: Any) -> nn.Module:
    adapter = LoraConfig(r=4, target_modules=["q_proj", *targets], **config)
    return get_peft_model(MODELS["qwen3"](), adapter)


def unfrozen(model: Any, name: str) -> Any:
    model.get_parameter(name).requires_grad_()
    return model


def with_max_norm(model: Any) -> Any:
    model.get_input_embeddings().max_norm = 1.0
    return model


def with_own_forward() -> nn.Module:
    model: Any = tiny("qwen3")
    embedding = model.get_input_embeddings()
    vars(embedding)["forward"] = lambda ids: F.embedding(ids, embedding.weight)
    return model


def with_other_head() -> nn.Module:
    model: Any = tiny("qwen3")
    model.get_base_model().lm_head = nn.Sequential(model.get_base_model().lm_head)
    return model


def classifier() -> nn.Module:
    return with_lora(LlamaForSequenceClassification(LlamaConfig(**SHAPE, pad_token_id=0)))


def with_third_user() -> nn.Module:
    model: Any = tied("qwen3")
    base = model.get_base_model()
    base.other = nn.Linear(32, 64, bias=False)
    base.other.weight = base.lm_head.weight
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


PAIR: dict[str, Any] = {"embeddings": "host", "head": "host"}
ON_DEVICE = '`head="device"` with `embeddings="device"`'


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    "embeddings: trained": (
        lambda: adapted(modules_to_save=["embed_tokens"]),
        {"embeddings": "host"},
        "is ModulesToSaveWrapper",
        '`embeddings="device"`',
    ),
    "embeddings: LoRA": (
        lambda: adapted("embed_tokens"),
        {"embeddings": "host"},
        "is Embedding",
        '`embeddings="device"`',
    ),
    "embeddings: tokens": (
        lambda: adapted(trainable_token_indices=[3]),
        {"embeddings": "host"},
        "is TrainableTokensWrapper",
        '`embeddings="device"`',
    ),
    "embeddings: unfrozen": (
        lambda: unfrozen(tiny("qwen3"), "base_model.model.model.embed_tokens.weight"),
        {"embeddings": "host"},
        "`model.embed_tokens` trains",
        '`embeddings="device"`',
    ),
    "embeddings: max_norm": (
        lambda: with_max_norm(tiny("qwen3")),
        {"embeddings": "host"},
        "`model.embed_tokens` has a max_norm",
        '`embeddings="device"`',
    ),
    "embeddings: forward": (
        lambda: with_own_forward(),
        {"embeddings": "host"},
        "has another forward than Embedding",
        '`embeddings="device"`',
    ),
    "head: trained": (
        lambda: adapted(modules_to_save=["lm_head"]),
        {"head": "host"},
        "is ModulesToSaveWrapper",
        '`head="device"`',
    ),
    "head: unfrozen": (
        lambda: unfrozen(tiny("qwen3"), "base_model.model.lm_head.weight"),
        {"head": "host"},
        "`lm_head` trains",
        '`head="device"`',
    ),
    "head: no linear layer": (
        lambda: with_other_head(),
        {"head": "host"},
        "`lm_head` is Sequential",
        '`head="device"`',
    ),
    "head: none": (lambda: classifier(), {"head": "host"}, "has no output head", '`head="device"`'),
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
        lambda: unfrozen(tied("qwen3"), "base_model.model.lm_head.weight"),
        PAIR,
        "`lm_head` trains; a head in host memory is frozen",
        ON_DEVICE,
    ),
    "trained with layers": (
        lambda: unfrozen(tied("qwen3"), "base_model.model.lm_head.weight"),
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
        lambda: with_max_norm(tied("qwen3")),
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
    before = dict(vars(model.get_input_embeddings()))
    with pytest.raises(UnsupportedModelError) as refused:
        offload.attach(model, num_slots=2, device="cpu", **options)
    assert what in str(refused.value)
    assert refused.value.hint == hint
    assert vars(model.get_input_embeddings()) == before
    kept = {"trained_weights": options["trained_weights"]} if "trained_weights" in options else {}
    offload.attach(model, num_slots=2, device="cpu", **kept).detach()
