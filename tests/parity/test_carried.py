"""Values that one layer computes and others read: the gradients of plain autograd.

Keys and values (Gemma 4 and 3n, E2B and E4B), chosen tokens (GLM-5), states of routers (ZAYA).
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from finetune.full.weights import choose_weights
from finetune.model.facts import facts_of
from finetune.training.compile import compile_layers
from offload.engine.engine import Engine, EngineOptions
from offload.engine.model.carried import FromBelow
from offload.engine.model.layers import LayeredModel
from offload.engine.tracing.visits import trace_visits
from offload.errors import UnsupportedModelError
from offload.plan.facts.trainable import prefix_spec
from offload.plan.facts.workload import embedding_bytes, most_rows_bytes
from offload.plan.machine.machine import named_machine
from offload.plan.memory.memory import (
    CARRIED,
    CARRIED_GRADIENTS,
    HIDDEN,
    KEPT_INPUTS,
    RECORDED,
    TracedBytes,
    device_needs,
    input_bytes,
)
from offload.plan.schedule.op import Kind
from offload.plan.schedule.schedule import Order
from offload.plan.scoring import ScoreRequest, plan_scoring
from offload.plan.sharded import sharded_choice
from tests.builders import lora, request, workload
from tests.parity.objectives import ByRow, against_scored, pairs, plain_step
from tests.parity.steps import OPTIONS, second_step_bytes
from tests.parity.tiny_models import SHARED_INDICES, SHARED_KEYS, tiny_model, with_adapters
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

Gradients = dict[str, torch.Tensor]
NUM_LAYERS, NUM_SHARED, VOCABULARY = 6, 3, 64
SOURCES = {3: 1, 4: 2, 5: 1}  # by layer that reads keys and values, the one that made them
GEMMA, GEMMA_3N = "gemma4_text", f"gemma3n_text, {SHARED_KEYS}"
GLM, ZAYA = f"glm_moe_dsa, {SHARED_INDICES}", "zaya"
FAMILIES = {
    GEMMA: SOURCES,
    GEMMA_3N: {2: 0, 3: 1},
    GLM: {1: 0, 2: 0},
    ZAYA: {1: 0, 2: 1, 3: 2},
}
WITHOUT_GRADIENT = (".indexer.", ".correction_coefs")  # the latter by a product of its own
PADDED, PACKED = (12, 15), (11, 4, 16)  # tokens of the widest rows; of packed rows


def base_of(*, head_dim: int = 8) -> Any:
    """Return six layers, of which the last ones read keys and values."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"global_head_dim": head_dim}  # a field that the class takes by name
    config = Gemma4TextConfig(
        **sizes,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=NUM_SHARED,
        use_double_wide_mlp=True,
        pad_token_id=0,
    )
    return Gemma4ForCausalLM(config)


def bare(family: str, **changes: Any) -> Any:
    return base_of(**changes) if family == GEMMA else tiny_model(family, **changes)


def built(family: str = GEMMA, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return the model with LoRA on all linears, all of it away from where it starts."""
    base = bare(family, **changes)
    base.set_experts_implementation("eager")  # no other computes in float64
    linears = [n for n, m in base.named_modules() if type(m) is nn.Linear and ".layers." in n]
    names = [n for n in linears if not any(part in n for part in WITHOUT_GRADIENT)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, about patterns that match nothing
        model = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=names))
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.to(dtype).train()


def layers_of(model: Any) -> Any:
    return model.get_base_model().model.layers


def padded() -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of two rows, the second of which is padded."""
    generator, batches = torch.Generator().manual_seed(1), []
    for width in PADDED:
        ids_BT = torch.randint(1, VOCABULARY, (2, width), generator=generator)
        mask_BT = torch.ones_like(ids_BT)
        mask_BT[1, width - 3 :] = 0
        labels_BT = ids_BT.masked_fill(mask_BT == 0, -100)
        batches.append({"input_ids": ids_BT, "labels": labels_BT, "attention_mask": mask_BT})
    return batches


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, VOCABULARY, (1, num), generator=generator) for num in PACKED]


def packed() -> list[dict[str, torch.Tensor]]:
    """Return two micro-batches: two rows packed into one, and a row alone."""
    ids_BT = torch.cat(rows()[:2], dim=1)
    two = {"input_ids": ids_BT, "labels": ids_BT.clone(), "row_lens": torch.tensor(PACKED[:2])}
    last_BT = rows()[2]
    one = {"input_ids": last_BT, "labels": last_BT.clone(), "row_lens": torch.tensor(PACKED[2:])}
    return [two, one]


def given(model: nn.Module) -> Gradients:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(found) == sum(p.requires_grad for p in model.parameters())
    return found


def by_autograd(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> Gradients:
    """Return the gradients of the mean loss over all labels, by the model's own whole forward."""
    model = copy.deepcopy(model)
    num = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        logits_BTV = model(**inputs, use_cache=False).logits[:, :-1].float()
        wanted_BT = batch["labels"][:, 1:]
        log_BT = logits_BTV.log_softmax(-1).gather(-1, wanted_BT.clamp(min=0)[..., None])[..., 0]
        (-(log_BT * (wanted_BT != -100)).sum() / num).backward()
    return given(model)


def step(
    model: nn.Module,
    batches: list[dict[str, torch.Tensor]],
    options: EngineOptions = OPTIONS,
    **arguments: Any,
) -> Gradients:
    model = copy.deepcopy(model)
    engine = Engine(model, device=torch.device("cpu"), options=options)
    try:
        engine.forward_backward(batches, dropout_seed=0, **arguments)
        return given(model)
    finally:
        engine.detach()


def apart(found: Gradients, wanted: Gradients) -> float:
    """Return how far the farthest gradient is, relative to its norm."""
    assert found.keys() == wanted.keys()
    assert all(bool(one.any()) for one in wanted.values())
    return max(float((found[n] - one).norm() / one.norm()) for n, one in wanted.items())


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 4e-6)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_reorder_a_streamed_step_has_the_gradients_of_autograd(
    family: str, kind: str, dtype: torch.dtype, limit: float
) -> None:
    model = built(family, dtype=dtype)
    alone = [{"input_ids": row, "labels": row.clone()} for row in rows()]
    wanted = by_autograd(model, padded() if kind == "padded" else alone)
    found = step(model, padded() if kind == "padded" else packed())
    assert apart(found, wanted) <= limit


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_that_read_and_those_they_read_are_found(family: str) -> None:
    carried = LayeredModel(built(family)).carried
    assert carried is not None
    assert carried.sources == FAMILIES[family]


def _detached(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _detached(x) for name, x in value.items()}
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value.detach()


@pytest.mark.parametrize("family", [GEMMA, GEMMA_3N, ZAYA])
def test_gradients_by_what_readers_read_are_in_those_of_the_producers_and_below(
    family: str,
) -> None:
    """What the other tests would show if a producer's visit left them out."""
    model = built(family, dtype=torch.float64)
    wanted, layers, sources = by_autograd(model, padded()), layers_of(model), FAMILIES[family]

    def cut(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        read = {
            name: kwargs[name] for name in ("shared_kv_states", "router_states") if name in kwargs
        }
        return args, kwargs | _detached(read)

    for reader in sources:
        reads = layers[reader].mlp.gate if family == ZAYA else layers[reader].self_attn
        reads.register_forward_pre_hook(cut, with_kwargs=True)
    without = by_autograd(model, padded())
    for layer in range(len(layers)):
        some = {n: x for n, x in wanted.items() if f".layers.{layer}." in n}
        error = apart({n: without[n] for n in some}, some)
        assert error == 0.0 if layer > max(sources.values()) else error > 1e-3


WAYS: dict[str, tuple[EngineOptions, dict[str, Any]]] = {
    "all in slots": (replace(OPTIONS, num_slots=NUM_LAYERS), {}),
    "inputs in RAM": (replace(OPTIONS, stash="host"), {}),
    "kept graphs": (replace(OPTIONS, num_kept_graphs=4), {}),
    "sent graphs": (replace(OPTIONS, num_sent_graphs=4), {}),
    "kept outputs": (replace(OPTIONS, num_kept_outputs=4), {}),
    "sent outputs": (replace(OPTIONS, num_sent_outputs=3, stash="host"), {}),
    "tables in RAM": (replace(OPTIONS, embeddings="host", head="host"), {}),
    "micro-batches first": (OPTIONS, {"order": Order.MICRO_BATCH_MAJOR}),
}


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("way", mostly_slow(list(WAYS), "sent graphs"))
@pytest.mark.parametrize("family", FAMILIES)
def test_move_a_step_is_the_same_however_it_is_streamed(family: str, way: str, kind: str) -> None:
    few: dict[str, Any] = {"vocab_size_per_layer_input": VOCABULARY // 2}
    few = few if family == GEMMA_3N else {}  # the other tokens have the inputs of token 0
    model, batches = built(family, **few), padded() if kind == "padded" else packed()
    options, arguments = WAYS[way]
    found, wanted = step(model, batches, options, **arguments), step(model, batches)
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


@pytest.mark.parametrize("family", mostly_slow(list(FAMILIES), GEMMA))
def test_reorder_preferences_have_the_gradients_of_autograd_over_all_rows_at_once(
    family: str,
) -> None:
    """Rows that are only scored carry values of their own, under the reference too."""
    model = built(family, dtype=torch.float64)
    batches, scored = pairs(1, 2), pairs(1, seed=7)
    objective = ByRow(against_scored, num_trained=6)
    found = step(model, batches, objective=objective, scored=scored)
    _, wanted = plain_step(model, batches, against_scored, scored=scored)
    assert apart(found, wanted) <= 2e-6


@pytest.mark.parametrize("family", [GEMMA, ZAYA])
def test_move_weights_that_train_in_ram_have_the_gradients_of_autograd(family: str) -> None:
    base = bare(family).train()
    base.requires_grad_(requires_grad=False)
    base.model.layers.requires_grad_(requires_grad=True)
    wanted = by_autograd(base, padded())
    options = replace(OPTIONS, trained_weights="host")
    engine = Engine(base, device=torch.device("cpu"), options=options)
    engine.forward_backward(padded(), dropout_seed=0)
    found = {n: p.grad for n, p in engine.trained_parameters.items() if p.grad is not None}
    engine.detach()
    assert apart(found, wanted) <= 4e-6


@pytest.mark.parametrize(
    ("model_type", "token_bytes"),
    [(ZAYA, 32 * 4), ("deepseek_v4", 4 * 32 * 2), (GEMMA_3N, 4 * 32 * 2)],
)
def test_inputs_of_other_sizes_wait_in_ram_and_a_plan_counts_them(
    model_type: str, token_bytes: int
) -> None:
    """In fp32 where weights are in bf16, and four hidden states of a token."""
    base = tiny_model(model_type)
    model: Any = with_adapters(base, base.model.layers).bfloat16()
    facts = facts_of(tiny_model(model_type))
    assert input_bytes(facts, workload(micro_batch_size=1, seq_len=10)) == 10 * token_bytes
    batches, found, num_bytes = padded(), [], list[int]()
    for options in (OPTIONS, replace(OPTIONS, stash="host")):
        engine = Engine(model, device=torch.device("cpu"), options=options)
        engine.forward_backward(batches, dropout_seed=0)
        num_bytes = [b.nbytes for arena in engine.arenas for b in arena.blocks]
        engine.detach()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert all(torch.equal(found[1][name], one) for name, one in found[0].items())
    num_tokens = sum(batch["input_ids"].numel() for batch in batches)
    assert any(size and size % (num_tokens * token_bytes) == 0 for size in num_bytes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_reorder_compiled_layers_have_the_gradients_of_autograd() -> None:
    model, batches = built(), padded()[:1]
    wanted = by_autograd(model, batches)
    compile_layers(layers_of(model))  # a copy would not be compiled
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    engine.forward_backward(batches, dropout_seed=0)
    engine.detach()
    assert apart(given(model), wanted) <= 2e-5


def test_readers_read_the_tokens_chosen_in_the_forward_visit_and_no_others() -> None:
    """The first token alone, where those of the recompute, or of the forward visit, are others."""
    model = built(GLM)
    wanted, keep = by_autograd(model, padded()), FromBelow.keep

    def apart_if(is_changed: Callable[[], bool]) -> float:
        def kept(below: FromBelow, layer: int, new: Any) -> Any:
            changed = {n: tuple(map(torch.zeros_like, x)) for n, x in new.items()}
            return keep(below, layer, changed if is_changed() else new)

        with mock.patch.object(FromBelow, "keep", kept):
            return apart(step(model, padded()), wanted)

    assert apart_if(torch.is_grad_enabled) == 0.0
    assert apart_if(lambda: not torch.is_grad_enabled()) > 1e-2


def test_an_indexer_gets_no_gradient_as_in_autograd() -> None:
    model = built(GLM)
    indexer = layers_of(model)[0].self_attn.indexer.requires_grad_(requires_grad=True)
    batch = padded()[0]
    model(**batch).loss.backward()
    assert all(x.grad is None for x in indexer.parameters())
    assert any(x.grad is not None for x in model.parameters())
    model.zero_grad()
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    engine.forward_backward([batch], dropout_seed=0)
    engine.detach()
    assert all(x.grad is None for x in indexer.parameters())
    assert any(x.grad is not None for x in model.parameters())


CLAMPS = r"Gemma3nForCausalLM clamps `prediction_coefs` of layer 1 in place, "


def test_weights_that_a_layer_clamps_are_within_the_bounds_and_do_not_train() -> None:
    """Then a write changes none of them; else plain training would change them by itself."""
    model = built(GEMMA_3N)
    weight = layers_of(model)[1].altup.prediction_coefs.base_layer.weight
    before = weight.detach().clone()
    step(model, padded())
    assert torch.equal(weight, before)
    with pytest.raises(UnsupportedModelError, match=f"{CLAMPS}which trains"):
        choose_weights(model.get_base_model(), ("*.layers.1.altup.*",))
    with pytest.raises(UnsupportedModelError, match=f"{CLAMPS}which trains"):
        step(model, padded())
    weight.requires_grad_(requires_grad=False)[0, 0] = 121.0
    with pytest.raises(UnsupportedModelError, match=f"{CLAMPS}to 120.0, and has larger ones"):
        step(model, padded())


def rows_together(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> frozenset[int]:
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    try:
        engine.forward_backward(batches, dropout_seed=0)
        return engine.rows_together
    finally:
        engine.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_all_layers_compute_packed_rows_together(dtype: torch.dtype) -> None:
    assert rows_together(built(dtype=dtype), packed()) == frozenset(range(NUM_LAYERS))


def test_a_reader_that_reads_values_of_other_rows_takes_one_row_after_the_other() -> None:
    """However little it takes of them: here nothing, as long as all are finite."""
    model: Any = built()

    def mix(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        shared = kwargs["shared_kv_states"].items()
        mixed = {n: tuple(x + 0 * x.sum(2, keepdim=True) for x in kv) for n, kv in shared}
        return args, kwargs | {"shared_kv_states": mixed}

    model.get_base_model().model.layers[4].self_attn.register_forward_pre_hook(
        mix, with_kwargs=True
    )
    alone = [{"input_ids": row, "labels": row.clone()} for row in rows()]
    assert apart(step(model, packed()), by_autograd(model, alone)) <= 4e-6
    assert rows_together(model, packed()) == frozenset(range(NUM_LAYERS)) - {4}


def test_what_another_layer_replaces_before_any_reads_it_is_not_carried() -> None:
    model: Any = built(dtype=torch.float64)
    model.get_base_model().model.layers[0].self_attn.store_full_length_kv = True
    assert LayeredModel(model).carried.sources == SOURCES  # type: ignore[union-attr]  # it is there
    assert apart(step(model, padded()), by_autograd(model, padded())) <= 1e-14


# ------------------------------------------------------- the table of the layers' inputs, in RAM


def test_a_step_brings_the_rows_of_both_tables_once_and_no_other() -> None:
    """Counted without our own code: 8 bytes for a token of each table, a row, and one more row."""
    model, batches = built(), packed()
    table = model.get_base_model().model.embed_tokens_per_layer.weight
    engine = Engine(model, device=torch.device("cpu"), options=WAYS["tables in RAM"][0])
    spans = engine.forward_backward(batches, dropout_seed=0).timeline.spans
    arenas = [block for arena in engine.arenas for block in arena.blocks]
    assert any(block.data_ptr() == table.data_ptr() for block in arenas)  # and not on a device
    engine.detach()
    distinct = [len(set(batch["input_ids"].flatten().tolist())) for batch in batches]
    widths = 32, 8 * NUM_LAYERS
    expected = [
        sum(-(-8 * num // 256) * 256 + (num + 1) * width * 4 for width in widths)
        for num in distinct
    ]
    assert [span.num_bytes for span in spans if span.kind is Kind.ROWS] == expected


def test_a_plan_counts_both_tables_where_they_are() -> None:
    facts = facts_of(base_of())
    assert facts.layer_table_parameters == VOCABULARY * 8 * NUM_LAYERS
    micro_batch = workload(embeddings="host", head="host", seq_len=40)
    table_bytes = 2 * facts.layer_table_parameters
    assert embedding_bytes(facts, micro_batch) == table_bytes
    assert embedding_bytes(facts, workload()) == 0
    of_tokens = -(-8 * 40 // 256) * 256 + 41 * 32 * 2
    of_layers = -(-8 * 40 // 256) * 256 + 41 * 8 * NUM_LAYERS * 2
    assert most_rows_bytes(facts, micro_batch) == of_tokens + of_layers


# ------------------------------------------------------------------------------------------ refused


def test_what_nobody_asked_for_is_refused_by_the_facts() -> None:
    facts = facts_of(base_of())
    with pytest.raises(
        UnsupportedModelError, match="what others have computed; a model that is cut"
    ):
        sharded_choice(facts, named_machine("rtx4090"), [request()])
    with pytest.raises(UnsupportedModelError, match="prefix for a gemma4_text model"):
        prefix_spec(facts, num_past=4, has_encoder=False)


def test_a_mapping_that_is_not_empty_or_not_the_same_is_refused() -> None:
    model: Any = built()
    layered = LayeredModel(model)
    assert layered.carried is not None
    notes = [
        replace(n, call=n.call.with_more({"shared_kv_states": {}}))
        for n in layered.notes(padded()[0])
    ]
    with pytest.raises(UnsupportedModelError, match="does not pass one empty `shared_kv_states`"):
        layered.carried.given(notes)


# -------------------------------------------------------------------------------------------- bytes

WIDE, NUM_TOKENS, NUM_KV_HEADS = 64, 24, 2
IDS = torch.randint(1, VOCABULARY, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(3))


WIDER: dict[str, dict[str, Any]] = {
    GEMMA: {"head_dim": WIDE},
    GEMMA_3N: {"head_dim": WIDE},
    GLM: {"index_topk": 16},
    ZAYA: {"router_hidden_size": WIDE},
}
OF_KEYS = 2 * 2 * NUM_KV_HEADS * WIDE * 4
TOKEN_BYTES = {GEMMA: OF_KEYS, GEMMA_3N: OF_KEYS, GLM: 16 * 4, ZAYA: 3 * WIDE * 4}
GRADIENT_BYTES = {GEMMA: OF_KEYS, GEMMA_3N: OF_KEYS, GLM: 0, ZAYA: WIDE * 4}  # at one time


@cache
def traced(family: str) -> TracedBytes:
    """Return the bytes of what a model passes to all layers, which formulas know of some alone."""
    model = built(family, **WIDER[family])
    return trace_visits(
        model,
        batch_size=1,
        seq_len=NUM_TOKENS,
        is_padded=False,
        head_chunk_tokens=OPTIONS.head_chunk_tokens,
        capability=None,
    )


def planned(num_micro_batches: int, family: str = GEMMA) -> dict[str, int]:
    """Return the terms of each row of a plan, at whatever instant."""
    micro_batch = workload(
        micro_batch_size=1,
        seq_len=NUM_TOKENS,
        label_tokens=NUM_TOKENS - 1,
        head_chunk_tokens=OPTIONS.head_chunk_tokens,
        adapter=lora(targets=("o_proj",), rank=2),
        dtype_bytes=4,
    )
    needs = device_needs(
        facts_of(bare(family, **WIDER[family])),
        replace(named_machine("rtx4090"), device="cpu"),
        micro_batch,
        num_micro_batches=num_micro_batches,
        is_reduced=False,
        is_padded=False,
        is_stashed=False,
        traced=None if family == GEMMA else traced(family),
    )
    return {row.name: row.num_bytes for row in needs.rows}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_counts_what_a_step_carries_and_its_gradients(family: str) -> None:
    """Counted where each micro-batch lets go of what one layer has made."""
    model, values, gradients = built(family, **WIDER[family]), dict[Any, int](), dict[int, int]()
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    carried = engine._layered.carried
    assert carried is not None
    own = carried.gradients

    def counted(layer: int, call: Any) -> Any:
        (below,) = (x for x in call.kwargs.values() if isinstance(x, FromBelow))
        made = {i: [x for one in of.values() for x in one] for i, of in below.made.items()}
        for x in made.get(layer, ()):
            values[layer, x.data_ptr()] = x.untyped_storage().nbytes()
        there = [x.grad for some in made.values() for x in some if x.grad is not None]
        size = sum(x.untyped_storage().nbytes() for x in there)
        gradients[id(below.made)] = max(size, gradients.get(id(below.made), 0))
        return own(layer, call)

    with mock.patch.object(carried, "gradients", counted):
        engine.forward_backward([{"input_ids": IDS, "labels": IDS}] * 3)
    engine.detach()
    assert {layer for layer, _ in values} == {*FAMILIES[family].values()}
    plan = planned(3, family)
    assert sum(values.values()) == plan[CARRIED] == 3 * NUM_TOKENS * TOKEN_BYTES[family]
    assert sum(gradients.values()) == 3 * NUM_TOKENS * GRADIENT_BYTES[family]
    twice = (
        2 if family == ZAYA else 1
    )  # a router's is let go of when that of the one below is there
    assert plan[CARRIED_GRADIENTS] == twice * sum(gradients.values())


def test_a_plan_of_scores_counts_what_its_passes_carry() -> None:
    asked = ScoreRequest(
        workload=workload(),
        lengths=(NUM_TOKENS,) * 4,
        num_labels=40,
        num_adapters=2,
        adapter_bytes=0,
        num_slots=2,
        vram_budget_bytes=None,
        is_on_disk=False,
    )
    facts, machine = facts_of(base_of()), named_machine("rtx4090")
    sizes = [
        {x.name: x.num_bytes for x in plan_scoring(one, machine, asked).device_memory}
        for one in (facts, replace(facts, carried_features=0))
    ]
    carried = sizes[0]["hidden states"] - sizes[1]["hidden states"]
    assert carried == 2 * 4 * NUM_TOKENS * facts.carried_features * 2  # of adapters, rows, bf16


def peak_bytes(num_micro_batches: int, family: str) -> int:
    model = built(family, **WIDER[family])
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    return second_step_bytes(engine, [{"input_ids": IDS, "labels": IDS}] * num_micro_batches)


@pytest.mark.parametrize("family", [GEMMA, GEMMA_3N, ZAYA])
def test_a_step_takes_no_more_for_each_micro_batch_than_a_plan_counts(family: str) -> None:
    """And little less: the inputs of the two highest layers are gone when all gradients are there.

    Nothing else of a reader's visit lives on.
    """
    found = (peak_bytes(5, family) - peak_bytes(2, family)) / 3
    names = (KEPT_INPUTS, HIDDEN, RECORDED, CARRIED, CARRIED_GRADIENTS)
    counted = sum(planned(5, family)[name] - planned(2, family)[name] for name in names) / 3
    assert found <= counted
    assert found == pytest.approx(counted, rel=0.1 if family == GEMMA else 0.25)
