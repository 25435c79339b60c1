"""MLPs computed some tokens at a time: the gradients of plain PyTorch, in less memory."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapter.linear_lora import compute_in_base_dtype
from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.model.hooks import visit_with_graph
from offload.engine.model.layers import LayeredModel
from offload.engine.model.readers import TiledMlps
from offload.engine.recompute.tiled import TiledMlp
from offload.engine.tracing.tracer import LiveBytes, Tracer
from offload.engine.tracing.visits import trace_visits
from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import AdapterSpec, linear_names, model_facts
from offload.plan.facts.workload import LayerCode
from offload.plan.machine.machine import named_machine
from offload.plan.memory.visit import visit_bytes
from offload.plan.schedule.op import Kind, Lane
from tests.builders import workload
from tests.doubles import HookedDevice
from tests.parity.architectures import gradients, micro_batches, plain, rel_error
from tests.parity.steps import OPTIONS
from tests.parity.tiny_models import balanced, tiny_model, with_adapters
from tests.tiers import each_value, mostly_slow, tiered

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNK = 5  # of 24 tokens or more: the last tile is shorter
TILED = replace(OPTIONS, mlp_chunk_tokens=CHUNK)
DENSE = ["llama", "qwen3", "mistral", "gemma3_text", "gemma2", "phi3", "gpt2", "starcoder2", "phi"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def step(
    model: nn.Module, options: EngineOptions
) -> tuple[float, dict[str, torch.Tensor], list[int]]:
    """Return loss and gradients of a step, and how many tiled MLPs each layer has."""
    model = copy.deepcopy(model)
    engine = Engine(model, device=torch.device("cpu"), options=options)
    try:
        result = engine.forward_backward(micro_batches(), dropout_seed=0)
        mlps = engine._bound.executor.found().mlps
        return result.loss, dict(gradients(model)), [len(mlps[i]) for i in sorted(mlps)]
    finally:
        engine.detach()


def require_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def require_exact(model: nn.Module) -> None:
    loss, ours, mlps = step(model, TILED)
    assert mlps == [1] * len(mlps)
    plain_loss, reference = plain(model, micro_batches())
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, reference) < 1e-6
    resident = step(model, replace(TILED, num_slots=len(mlps)))
    require_same((loss, ours), resident)


@pytest.mark.parametrize("model_type", mostly_slow(DENSE, "gemma2"))
def test_reorder_gradients_are_those_of_plain_pytorch(model_type: str) -> None:
    base = tiny_model(model_type)
    require_exact(with_adapters(base, LayeredModel(base).layers))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    mostly_slow(
        {
            "none in the MLP": {"target_modules": ["q_proj", "v_proj"]},
            "DoRA": {"use_dora": True},
            "down trained whole": {"modules_to_save": ["down_proj"]},
            "up trained whole": {"modules_to_save": ["up_proj"]},
        },
        "DoRA",
    ),
)
@pytest.mark.parametrize("is_grouped", mostly_slow([False, True], True))
def test_reorder_gradients_of_any_adapter_are_those_of_plain_pytorch(
    changes: dict[str, Any], is_grouped: bool
) -> None:
    whole = changes.get("modules_to_save", ())
    targets = [
        name for name in ("q_proj", "gate_proj", "up_proj", "down_proj") if name not in whole
    ]
    torch.manual_seed(0)
    settings: dict[str, Any] = {"r": 2, "target_modules": targets}
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(**settings | changes)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    if is_grouped:
        compute_in_base_dtype(model)
    require_exact(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    mostly_slow(
        [{"num_kept_graphs": 2}, {"num_kept_graphs": 4}, {"stash": "host"}, {"leaves_out": False}],
        {"num_kept_graphs": 2},
    ),
)
def test_move_however_a_step_runs_its_tiles_give_the_same_bits(changes: dict[str, Any]) -> None:
    base = tiny_model("llama")
    model = with_adapters(base, LayeredModel(base).layers)
    compute_in_base_dtype(model)
    require_same(step(model, TILED), step(model, replace(TILED, **changes)))


@pytest.mark.slow
def test_move_encoded_weights_are_tiled_as_resident_ones() -> None:
    base = tiny_model("qwen3")
    model = with_adapters(base, LayeredModel(base).layers)
    options = replace(TILED, codec="nf4")
    one = step(model, options)
    require_same(one, step(model, replace(options, num_slots=4, num_kept_graphs=2)))


def test_trained_weights_on_the_host_get_the_gradients_of_all_tiles() -> None:
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp." in name or "q_proj" in name)
    copied = copy.deepcopy(model)
    engine = Engine(
        copied, device=torch.device("cpu"), options=replace(TILED, trained_weights="host")
    )
    try:
        engine.forward_backward(micro_batches(), dropout_seed=0)
        trained = engine.trained_parameters.items()
        ours = {name: p.grad.clone() for name, p in trained if p.grad is not None}
    finally:
        engine.detach()
    _, reference = plain(model, micro_batches())
    assert rel_error(ours, reference) < 1e-6


@pytest.mark.thorough
def test_an_mlp_that_draws_or_is_a_mixture_is_computed_whole() -> None:
    base = tiny_model("llama")
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "down_proj"])
    with pytest.raises(UnsupportedModelError, match=r"mlp_chunk_tokens is 5, but no MLP of") as e:
        step(get_peft_model(base, config).train(), TILED)
    assert e.value.hint == "`mlp_chunk_tokens=None`"
    with pytest.raises(UnsupportedModelError, match="no MLP of MixtralForCausalLM"):
        step(balanced("mixtral"), TILED)


@pytest.mark.thorough
def test_a_mixture_s_dense_layers_are_tiled_and_its_experts_are_not() -> None:
    base = tiny_model("deepseek_v3")
    model = with_adapters(base, LayeredModel(base).layers)
    loss, ours, mlps = step(model, TILED)
    assert mlps[0] == 1
    plain_loss, reference = plain(model, micro_batches())
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, reference) < 1e-6


class Mixing(nn.Module):
    """An MLP that hands something from token to token, by the memory of a view."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(x)
        size = y.shape
        return y + 0.1 * y.transpose(0, -1).reshape(-1).view(size)


def test_what_mixes_tokens_is_refused_by_its_values() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    adapted = with_adapters(model, LayeredModel(model).layers)
    with pytest.raises(UnsupportedModelError, match="layer 1 that cannot be computed in tiles"):
        step(adapted, TILED)


class Thresholded(nn.Module):
    """An MLP that does something else for many tokens, or for large values."""

    def __init__(self, mlp: nn.Module, *, is_by_length: bool) -> None:
        super().__init__()
        self.mlp, self.is_by_length = mlp, is_by_length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(x)
        is_above = x.shape[1] > 8 if self.is_by_length else bool(x.abs().max() > 1)
        return 0.5 * y if is_above else y


def thresholded(*, is_by_length: bool) -> nn.Module:
    model = tiny_model("llama")
    own = model.model.layers[1].mlp
    model.model.layers[1].mlp = Thresholded(own, is_by_length=is_by_length)
    return with_adapters(model, LayeredModel(model).layers)


@pytest.mark.thorough
def test_an_mlp_that_may_do_something_else_in_tiles_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="may compute something else for more tokens"):
        step(thresholded(is_by_length=True), TILED)


@pytest.mark.slow
def test_of_an_mlp_that_looks_at_all_its_tokens_what_does_not_is_tiled() -> None:
    model = thresholded(is_by_length=False)
    _, expected = plain(model, micro_batches())
    _, ours, _ = step(model, TILED)
    assert rel_error(ours, expected) < 1e-6


@pytest.mark.thorough
def test_a_visit_in_tiles_keeps_one_tile_of_the_wide_tensors() -> None:
    """Counted tensor by tensor: of 256 tokens, tiles of 32 leave an eighth of the MLP's memory."""
    num_tokens, chunk, hidden, width = 256, 32, 32, 512
    model = tiny_model("llama", intermediate_size=width, max_position_embeddings=num_tokens)
    adapted = with_adapters(model, LayeredModel(model).layers)
    compute_in_base_dtype(adapted)
    layered = LayeredModel(adapted)
    front = layered.front({"input_ids": torch.zeros(1, num_tokens, dtype=torch.long)})

    def run() -> object:
        with torch.no_grad():
            return layered.layer_forward(0, front.hidden_BTD, front.calls[0])

    def peak(mlps: tuple[TiledMlp, ...]) -> int:
        memory = LiveBytes()
        with Tracer(memory):
            graph = visit_with_graph(
                layered, 0, input_BTD=front.hidden_BTD, call=front.calls[0], mlps=mlps
            )
            graph.backward(torch.ones_like(front.hidden_BTD), [])
        return memory.peak_bytes

    found = TiledMlps(chunk_tokens=chunk).of(layered.layers[0], run)
    whole, in_tiles = peak(()), peak(tuple(found.values()))
    wide_bytes = num_tokens * width * 4
    assert whole > 4 * wide_bytes
    saved = whole - in_tiles
    # all wide tensors but those of a tile go; a few of the hidden state's width come
    assert saved > (whole - 20 * num_tokens * hidden * 4) * (1 - 2 * chunk / num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_slow(range(3), 0))
def test_reorder_in_16_bits_tiles_are_as_near_the_truth_as_whole_mlps(seed: int) -> None:
    torch.manual_seed(seed)
    base = tiny_model("llama")
    whole = with_adapters(base, LayeredModel(base).layers).to(torch.bfloat16)
    for name, parameter in whole.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    compute_in_base_dtype(whole)
    _, truth = plain(copy.deepcopy(whole).double(), micro_batches())

    def error(options: EngineOptions) -> float:
        _, ours, _ = step(whole, options)
        off = sum(float((ours[n].double() - g.double()).square().sum()) for n, g in truth.items())
        return off**0.5

    assert 0 < error(TILED) <= 1.05 * error(replace(TILED, mlp_chunk_tokens=None))


TRACED = ("llama", "qwen3", "phi3", "mistral", "olmo2", "glm4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "is_grouped", "code"),
    tiered(
        itertools.product(TRACED, (False, True), ("plain", "fused")),
        default=[("qwen3", True, "fused")],
        slow=each_value(TRACED, (False, True), ("plain", "fused", "fused", "plain")),
    ),
)
def test_the_formula_of_a_visit_in_tiles_is_its_trace_within_a_tenth(
    model_type: str, is_grouped: bool, code: LayerCode
) -> None:
    num_tokens, hidden = 1024, 512
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    others = {"vocab_size": 256, "max_position_embeddings": num_tokens, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes | heads | others)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        facts = model_facts(config.to_dict())
        targets = linear_names(facts)
        lora = LoraConfig(r=16, target_modules=list(targets))
        model = get_peft_model(base, lora).train()
    if is_grouped:
        compute_in_base_dtype(model)
    spec = AdapterSpec(rank=16, targets=targets, experts=False, is_in_base_dtype=is_grouped)
    found = trace_visits(
        model,
        batch_size=1,
        seq_len=num_tokens,
        is_padded=False,
        head_chunk_tokens=64,
        capability=(8, 9),
        mlp_chunk_tokens=64,
        plain_parts=frozenset() if code == "fused" else None,
    )
    asked = workload(seq_len=num_tokens, adapter=spec, mlp_chunk_tokens=64, layer_code=code)
    one = visit_bytes(facts, named_machine("rtx4090"), facts.layers[0], asked, is_padded=False)
    rel = 0.2 if (model_type, code) == ("glm4", "fused") else 0.1  # the plan says more
    assert one.graph + one.gradients + one.tile == pytest.approx(found.visits[0], rel=rel)


@pytest.mark.thorough
def test_a_step_in_tiles_takes_what_its_trace_does() -> None:
    model = tiny_model("llama", intermediate_size=256, max_position_embeddings=128)
    adapted = with_adapters(model, LayeredModel(model).layers)
    compute_in_base_dtype(adapted)
    sizes = {"batch_size": 1, "seq_len": 128, "is_padded": False, "head_chunk_tokens": 8}
    whole, tiled = (
        max(trace_visits(adapted, **sizes, capability=None, mlp_chunk_tokens=n).visits)  # type: ignore[arg-type]
        for n in (None, 16)
    )
    memory, peaks = LiveBytes(), dict[int, int]()
    tracer = Tracer(memory)

    def around(number: int, lane: Lane, body: Callable[[], None]) -> None:
        if lane is not Lane.COMPUTE:
            body()
            return
        with tracer:
            before = memory.live_bytes
            memory.reset_peak()
            body()
            peaks[number] = memory.peak_bytes - before

    options = replace(TILED, mlp_chunk_tokens=16, head_chunk_tokens=8)
    engine = Engine(adapted, device=HookedDevice(around), options=options)
    ids = torch.zeros(1, 128, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    try:
        engine.forward_backward([batch], dropout_seed=0)
        spans = engine.forward_backward([batch, batch], dropout_seed=0).timeline.spans
    finally:
        engine.detach()
    found = [peaks[i] for i, span in enumerate(spans) if span.kind is Kind.BACKWARD]
    assert tiled < 0.8 * whole
    assert max(found) == pytest.approx(tiled, rel=0.02)
