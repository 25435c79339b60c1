"""Layers that wait encoded: the same bits as a resident model of the rounded weights (MOVE)."""

import copy
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

import offload
from finetune.adapter.lora import add_lora, save_adapter
from finetune.recipe.adapters import LoraSection
from offload.engine.host.slab import Slab, lay_out
from offload.engine.host.weights import values_shown
from offload.engine.model.encoding import Encoding
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.codec import CODECS
from offload.plan.facts.facts import AdapterSpec
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.machine import named_machine
from offload.plan.schedule.schedule import Order, Residency
from tests.bench.bench_loading import load_apart, published_config
from tests.builders import adapter, model_facts, request, workload
from tests.checkpoints import write_checkpoint
from tests.parity.architectures import micro_batches as padded_batches
from tests.parity.experts import TYPES, randomised
from tests.parity.rounding import matrices, rounded
from tests.parity.steps import (
    MODELS,
    NUM_LAYERS,
    SHAPE,
    assert_equal,
    gradients,
    micro_batches,
    resident,
    streamed,
    tiny,
    with_lora,
)
from tests.parity.tiny_models import NUM_LAYERS as NUM_MODEL_LAYERS
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

ANY_WEIGHTS = [name for name in CODECS if not CODECS[name].published]
LOSSY = [name for name in ANY_WEIGHTS if name not in ("native", "bf16_packed")]


def encoded_step(
    model: PeftModel,
    codec: str,
    *,
    order: Order = Order.LAYER_MAJOR,
    tier: Literal["ram", "disk"] = "ram",
    store_dir: str | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    engine = offload.attach(
        model,
        num_slots=2,
        codec=codec,
        device="cpu",
        tier=tier,
        store_dir=store_dir,
        head_chunk_tokens=7,
    )
    try:
        engine.forward_backward(micro_batches(), dropout_seed=0, order=order)
        model.zero_grad()
        result = engine.forward_backward(micro_batches(), dropout_seed=0, order=order)
        return result.loss, gradients(model)
    finally:
        engine.detach()


@pytest.mark.parametrize(
    ("name", "codec"),
    mostly_slow(itertools.product(MODELS, LOSSY), ("gpt_oss", "nf4")),
)
def test_move_encoded_layers_compute_as_resident_rounded_ones(name: str, codec: str) -> None:
    model = tiny(name)
    expected = streamed(rounded(model, codec), num_slots=NUM_LAYERS)
    assert resident(name)[0] != expected[0]
    assert_equal(encoded_step(model, codec), expected)


@pytest.mark.thorough
def test_move_packed_layers_compute_as_the_layers_themselves() -> None:
    torch.manual_seed(0)
    model = with_lora(MODELS["qwen3_moe"]().bfloat16())
    expected = streamed(model, num_slots=NUM_LAYERS)
    assert matrices(model, "bf16_packed")
    assert_equal(encoded_step(model, "bf16_packed"), expected)


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
def test_a_cast_to_the_type_that_weights_have_leaves_them_as_they_are(codec: str) -> None:
    model = MODELS["qwen3"]().requires_grad_(False)
    assert matrices(model, codec)
    assert not matrices(model.half() if codec == "fp16" else model.bfloat16(), codec)


@pytest.mark.thorough
def test_move_encoded_layers_from_disk_and_in_the_usual_order(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    order = Order.MICRO_BATCH_MAJOR
    expected = streamed(rounded(model, "nf4"), num_slots=NUM_LAYERS, order=order)
    found = encoded_step(
        copy.deepcopy(model), "nf4", order=order, tier="disk", store_dir=str(tmp_path)
    )
    assert_equal(found, expected)


@pytest.mark.thorough
def test_evaluation_sees_the_decoded_weights() -> None:
    model = tiny("qwen3_moe").eval()
    (batch,) = micro_batches(1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = rounded(model, "nf4")(**inputs).logits
    engine = offload.attach(model, num_slots=2, codec="nf4", device="cpu")
    found = engine.forward(inputs).logits
    assert found is not None
    torch.testing.assert_close(found, expected)


def test_norms_biases_routers_and_adapters_stay_as_they_are() -> None:
    for name in ("qwen3_moe", "gpt_oss"):
        model = tiny(name)
        found = [key for key in matrices(model, "nf4") if ".layers.0." in key]
        experts = {key.rpartition(".")[2] for key in found if "experts" in key}
        assert experts == {"gate_up_proj", "down_proj"}
        assert sum("self_attn" in key for key in found) == 4
        assert len(found) == 6


PLANNED: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    "phi3": {"pad_token_id": 0},  # few and wide tensors
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},  # biases
}


@pytest.mark.thorough
@pytest.mark.parametrize("codec", ANY_WEIGHTS)
@pytest.mark.parametrize("model_type", mostly_slow(list(PLANNED), "gpt_oss"))
def test_planned_arenas_are_those_that_the_engine_takes(model_type: str, codec: str) -> None:
    shape = {**SHAPE, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    config = AutoConfig.for_model(model_type, **{**shape, **PLANNED[model_type]})
    model = AutoModelForCausalLM.from_config(config).bfloat16().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    engine = offload.attach(model, num_slots=2, codec=codec, device="cpu")
    taken = {arena.name: arena.num_bytes for arena in engine.arenas if arena.num_bytes}
    engine.detach()
    facts = model_facts(config.to_dict())
    adapter = AdapterSpec(rank=2, targets=("o_proj",), experts=False)
    micro_batch = workload(codec=codec, adapter=adapter)
    cpu = replace(named_machine("rtx4060ti"), device="cpu")
    needs = MemoryNeeds.of(facts, cpu, request(micro_batch, num_slots=2))
    two = Residency(num_slots=2)
    planned = {term.name: term.num_bytes for term in (*needs.device(two), *needs.host(two))}
    assert taken == {name: planned[name] for name in taken}
    assert ("decoded layer" in planned) == ("decoded layer" in taken) == micro_batch.is_encoded


def test_a_detached_model_has_the_rounded_weights_and_the_rest_untouched() -> None:
    model = tiny("qwen3_moe")
    expected = dict(rounded(model, "nf4").named_parameters())
    offload.attach(model, num_slots=2, codec="nf4", device="cpu").detach()
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


@pytest.mark.thorough
def test_weights_that_train_on_the_host_are_not_encoded_and_the_frozen_ones_are() -> None:
    model = MODELS["qwen3"]().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    expected = streamed_on_host(rounded(model, "nf4"), "native")
    assert_equal(streamed_on_host(model, "nf4"), expected)


def streamed_on_host(model: PreTrainedModel, codec: str) -> tuple[float, dict[str, torch.Tensor]]:
    engine = offload.attach(
        model,
        num_slots=2,
        codec=codec,
        device="cpu",
        trained_weights="host",
        head_chunk_tokens=7,
    )
    loss = engine.forward_backward(micro_batches(), dropout_seed=0).loss
    found = {n: p.grad.clone() for n, p in engine.trained_parameters.items() if p.grad is not None}
    engine.detach()
    return loss, found


def test_a_codec_that_is_not_there_is_refused() -> None:
    with pytest.raises(offload.CodecError, match="there is no codec 'nf3'"):
        offload.attach(tiny("qwen3"), num_slots=2, device="cpu", codec="nf3")


# ------------------------------------------------------------------------------------------ loading


def as_loaded(model: PreTrainedModel, codec: str) -> Slab:
    """Let a model's layers lie in a slab, encoded, as they do behind a loader."""
    layered = LayeredModel(model)
    groups = [list(layer.parameters()) for layer in layered.layers]
    records = map(lay_out, groups, map(Encoding(layered, codec).codecs, groups))
    slab = Slab(list(records))
    for layer in range(len(slab.records)):
        slab.take(layer)
    return slab


def test_encoded_weights_show_no_values_but_inside_a_block_that_asks_for_them() -> None:
    model = MODELS["qwen3"]().requires_grad_(False)
    expected = rounded(model, "nf4").get_parameter("model.layers.3.mlp.up_proj.weight")
    slab = as_loaded(model, "nf4")
    weight = model.get_parameter("model.layers.3.mlp.up_proj.weight")
    norm = model.get_parameter("model.layers.3.input_layernorm.weight")
    assert weight.isnan().all()
    assert not norm.isnan().any()
    with values_shown(slab, 3):
        assert torch.equal(weight, expected)
    assert weight.isnan().all()
    assert weight.untyped_storage().nbytes() == weight.element_size()


@pytest.mark.parametrize("trained_weights", ["device", "host"])
def test_an_encoded_weight_that_is_to_train_is_refused_by_name(
    trained_weights: Literal["device", "host"],
) -> None:
    model = MODELS["qwen3"]().requires_grad_(False)
    slab = as_loaded(model, "nf4")
    model.get_parameter("model.layers.3.mlp.up_proj.weight").requires_grad_(True)
    with pytest.raises(
        offload.OffloadError, match=r"layers\.3\.mlp\.up_proj\.weight has no values"
    ):
        offload.attach(
            model,
            num_slots=2,
            codec="nf4",
            device="cpu",
            backing=slab,
            trained_weights=trained_weights,
        )


def test_a_copy_of_an_encoded_weight_is_refused_by_name() -> None:
    model = MODELS["qwen3"]().requires_grad_(False)
    slab = as_loaded(model, "nf4")
    wrapped = get_peft_model(
        model, LoraConfig(target_modules=["q_proj"], modules_to_save=["o_proj"])
    )
    with pytest.raises(offload.OffloadError, match=r"o_proj\.\S+\.weight has no values"):
        offload.attach(wrapped, num_slots=2, codec="nf4", device="cpu", backing=slab)


@pytest.mark.parametrize(("loaded", "asked"), [("nf4", "native"), ("native", "nf4")])
def test_layers_that_were_loaded_in_another_form_are_refused(loaded: str, asked: str) -> None:
    model = MODELS["qwen3"]().requires_grad_(False)
    slab = as_loaded(model, loaded)
    with pytest.raises(offload.OffloadError, match=r"the layers were loaded as .*is asked for"):
        offload.attach(model, num_slots=2, codec=asked, device="cpu", backing=slab)


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_weight_that_cannot_be_written_is_named(
    tier: Literal["ram", "disk"], tmp_path: Path
) -> None:
    model = MODELS["qwen3"]().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with torch.no_grad():
        model.get_parameter("model.layers.3.mlp.up_proj.weight")[2, 5] = float("inf")
    store_dir = str(tmp_path) if tier == "disk" else None
    with pytest.raises(offload.CodecError, match=r"weight 7 of layer 3, \(64, 32\): "):
        offload.attach(
            model, num_slots=2, codec="nf4", device="cpu", tier=tier, store_dir=store_dir
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_dora_over_encoded_layers_starts_from_the_weights_that_they_decode_to() -> None:
    base = MODELS["qwen3"]().train().requires_grad_(False)
    section = adapter(rank=4, alpha=8.0, targets=["q_proj", "down_proj"], dora=True)
    expected = streamed(add_lora(rounded(base, "nf4"), section, seed=0), num_slots=NUM_LAYERS)
    slab = as_loaded(base, "nf4")
    model = add_lora(base, section, seed=0, backing=slab)
    engine = offload.attach(
        model, num_slots=2, codec="nf4", device="cpu", backing=slab, head_chunk_tokens=7
    )
    loss = engine.forward_backward(micro_batches(), dropout_seed=0).loss
    assert_equal((loss, gradients(model)), expected)
    assert any("magnitude" in name for name in expected[1])
    engine.detach()


# ------------------------------------------------------------------------- encoded in little memory


MIB = 2**20
HIDDEN, EXPERT_WIDTH, NUM_EXPERTS = 1024, 384, 64
LARGEST_BYTES = 2 * NUM_EXPERTS * 2 * EXPERT_WIDTH * HIDDEN  # a layer's gate and up projections
ALLOWED_BYTES = 2 * LARGEST_BYTES + 64 * MIB  # it, the one before it, and what is encoded of it


@pytest.fixture(scope="module")
def published() -> Iterator[Path]:
    config = published_config(
        500 * 10**6, hidden=HIDDEN, expert_width=EXPERT_WIDTH, num_experts=NUM_EXPERTS
    )
    with tempfile.TemporaryDirectory() as folder:  # on a disk: what is in memory would count
        write_checkpoint(Path(folder) / "model", config, shard_bytes=100 * MIB)
        yield Path(folder) / "model"


@pytest.mark.slow
@pytest.mark.disk
@pytest.mark.timeout(600)
def test_encoding_takes_two_tensors_at_a_time_and_fits_where_a_copy_does_not(
    published: Path, tmp_path: Path
) -> None:
    num_bytes = sum(file.stat().st_size for file in published.glob("*.safetensors"))
    assert num_bytes > 400 * MIB > 1.5 * ALLOWED_BYTES
    own = load_apart(
        published,
        way="own",
        codec="nf4",
        tier="disk",
        cache=tmp_path,
        limit_bytes=ALLOWED_BYTES + 64 * MIB,
    )
    assert own.outcome == "loaded"
    assert own.peak_bytes < ALLOWED_BYTES
    (store,) = tmp_path.rglob("*.store")
    assert store.stat().st_size < 0.3 * num_bytes
    copy = load_apart(
        published,
        way="copy",
        codec="native",
        tier="ram",
        cache=tmp_path,
        limit_bytes=ALLOWED_BYTES + 64 * MIB,
    )
    assert copy.outcome.startswith("died")


@pytest.mark.slow
@pytest.mark.disk
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_the_slab_of_the_next_start_is_as_large_as_the_store(
    published: Path, tmp_path: Path
) -> None:
    first, second = (
        load_apart(published, way="own", codec="nf4", tier="ram", cache=tmp_path) for _ in range(2)
    )
    (store,) = tmp_path.rglob("*.store")
    store_bytes = store.stat().st_size
    assert first.outcome == second.outcome == "loaded"
    assert first.peak_bytes < max(ALLOWED_BYTES, store_bytes + 64 * MIB)
    assert second.peak_bytes < store_bytes + 64 * MIB


# -------------------------------------------------------------------------------------------- qlora


# Wide enough for routers, norms and biases to weigh as little as they do in models of real size.
WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def base_of(model_type: str) -> PreTrainedModel:
    base = tiny_model(model_type, **WIDE)
    base.set_experts_implementation("eager")
    return base


def adapted(base: PreTrainedModel) -> PeftModel:
    section = LoraSection(rank=4, alpha=8.0, targets="attention", experts=True)
    model = add_lora(base, section, seed=0)
    torch.manual_seed(0)
    randomised(model)
    return model.train()


@pytest.mark.parametrize("model_type", mostly_slow(TYPES, "gpt_oss"))
def test_nf4_covers_the_experts_and_adapters_on_them_are_exact(
    model_type: str, tmp_path: Path
) -> None:
    """MOVE: the step of a resident model whose weights are what nf4 makes of them."""
    base = base_of(model_type)
    model, resident = adapted(copy.deepcopy(base)), adapted(rounded(base, "nf4"))
    engine = offload.attach(model, num_slots=2, codec="nf4", device="cpu")
    assert engine.weights.layers_encoded_frac > 0.98
    experts = [row for row in engine.weights.rows if row.kind == "experts"]
    assert [row.codec for row in experts] == ["nf4"]
    assert sum(engine.layer_bytes) < 0.17 * engine.weights.decoded_bytes  # 0.129 of fp32, and pages
    expected = offload.attach(resident, num_slots=NUM_MODEL_LAYERS, device="cpu")
    found = engine.forward_backward(padded_batches(), dropout_seed=0).loss, gradients(model)
    wanted = expected.forward_backward(padded_batches(), dropout_seed=0).loss, gradients(resident)
    assert_equal(found, wanted)
    assert any("experts" in name and bool(tensor.any()) for name, tensor in found[1].items())
    engine.detach()
    expected.detach()
    _require_same_elsewhere(model, rounded(base, "nf4"), tmp_path)


def _require_same_elsewhere(model: PeftModel, base: Any, folder: Path) -> None:
    """Check that plain transformers and peft compute the same with the saved adapter."""
    save_adapter(model, folder)
    plain = PeftModel.from_pretrained(base, folder).eval()
    input_ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        wanted = plain(input_ids=input_ids).logits
        torch.testing.assert_close(
            model.eval()(input_ids=input_ids).logits, wanted, rtol=1e-4, atol=1e-5
        )
        with plain.disable_adapter():
            assert not torch.allclose(plain(input_ids=input_ids).logits, wanted, atol=1e-2)
