"""Steps whose norms, rotations and gated activations are fused operators.

MOVE: with them, a streamed step is the resident one to the bit, however layers are stored.
REORDER: its gradients are off the truth by about what those of the models' own code are. One draw
of a tiny model in bf16 scatters by a third, so the sums of eight by a tenth.
"""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.model.layers import LayeredModel
from offload.plan.facts.codec import CodecName
from tests.counted import Counted
from tests.parity.steps import NUM_LAYERS, OPTIONS, SHAPE, micro_batches, rel_error, tiny, truth_of
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")
FUSED = replace(OPTIONS, layer_kernels="fused")
RESIDENT = replace(FUSED, num_slots=NUM_LAYERS)
Step = tuple[float, dict[str, torch.Tensor]]
# Fused parts of a layer: norms, rotations, gated MLPs.
FOUND = {
    "llama": (2, 1, 1),
    "qwen3": (4, 1, 1),
    "qwen3_moe": (4, 1, 0),
    "gemma3_text": (6, 1, 1),
    "gpt_oss": (2, 0, 0),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def step(model: nn.Module, options: EngineOptions) -> Step:
    model = copy.deepcopy(model)
    engine = Engine(model, device=torch.device("cpu"), options=options)
    try:
        loss = engine.forward_backward(micro_batches(), dropout_seed=0).loss
        return loss, {
            name: parameter.grad.clone()
            for name, parameter in engine.trained_parameters.items()
            if parameter.grad is not None
        }
    finally:
        engine.detach()


def in_dtype(name: str, dtype: torch.dtype, **settings: Any) -> Any:
    model = tiny(name, **settings)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" not in parameter_name:
            parameter.data = parameter.data.to(dtype)
    return model


def require_same(a: Step, b: Step) -> None:
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    assert all(torch.equal(a[1][name], b[1][name]) for name in a[1])


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(FOUND), "qwen3", "gpt_oss"))
def test_what_is_fused_is_found_by_what_it_computes(name: str) -> None:
    layered = LayeredModel(tiny(name))
    layered.fuse()
    assert layered.fused is not None
    counts = layered.fused.counts(1)
    assert (counts["Norm"], counts["Rotary"], counts["GatedMlp"]) == FOUND[name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(FOUND), "qwen3"))
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16], torch.bfloat16), ids=str
)
def test_reorder_fused_layers_are_as_exact_as_the_models_own_code(
    name: str, dtype: torch.dtype
) -> None:
    fused, plain = [], []
    for seed in range(8):
        model = in_dtype(name, dtype, seed=seed)
        truth = truth_of(model)
        fused.append(rel_error(step(model, FUSED)[1], truth))
        plain.append(rel_error(step(model, OPTIONS)[1], truth))
    assert fused != plain or name == "gpt_oss"  # whose norms alone are fused
    assert sum(fused) <= 1.4 * sum(plain) + 2 * torch.finfo(torch.float32).eps


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["qwen3", "gemma3_text", "qwen3_moe"], "gemma3_text"))
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16], torch.bfloat16), ids=str
)
def test_move_a_streamed_step_with_fused_layers_is_the_resident_one(
    name: str, dtype: torch.dtype
) -> None:
    model = in_dtype(name, dtype, dropout=0.2)
    require_same(step(model, FUSED), step(model, RESIDENT))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "reference"),
    mostly_slow(
        {
            "kept graphs": (replace(FUSED, num_kept_graphs=2), RESIDENT),
            "stash": (replace(FUSED, stash="host"), RESIDENT),
            "all products": (replace(FUSED, leaves_out=False), RESIDENT),
            "int8": (replace(FUSED, codec="int8"), replace(RESIDENT, codec="int8")),
            "packed": (replace(FUSED, codec="bf16_packed"), RESIDENT),
        },
        "packed",
    ),
)
def test_move_however_fused_layers_are_run_no_bit_differs(
    options: EngineOptions, reference: EngineOptions
) -> None:
    model = in_dtype("qwen3", torch.bfloat16)
    require_same(step(model, options), step(model, reference))


@pytest.mark.parametrize("codec", mostly_slow(["native", "int8"], "int8"))
def test_move_all_together_no_bit_differs(codec: CodecName) -> None:
    """Fused parts, MLPs in tiles, attention outputs kept and sent, graphs kept, inputs stashed."""
    model = in_dtype("qwen3", torch.bfloat16, dropout=0.0)
    tiles = replace(FUSED, mlp_chunk_tokens=5, codec=codec)
    together = replace(
        tiles, num_kept_graphs=1, num_kept_outputs=2, num_sent_outputs=2, stash="host"
    )
    resident = replace(tiles, num_slots=NUM_LAYERS)
    require_same(step(model, together), step(model, resident))


def test_a_fused_loss_is_one_operator_and_no_other_reads_the_logits_but_the_head() -> None:
    num_tokens, vocab = 32, 32768
    config = AutoConfig.for_model("qwen3", **{**SHAPE, "vocab_size": vocab})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(requires_grad=False)
    hidden_ND = torch.randn(num_tokens, SHAPE["hidden_size"], dtype=torch.bfloat16)
    labels_N = torch.arange(num_tokens)
    losses, gradients, moved, num_fused = [], [], [], []
    for is_fused in (False, True):
        layered = LayeredModel(model)
        if is_fused:
            layered.fuse()
        gradient_ND = torch.zeros_like(hidden_ND)
        with Counted() as counted:
            loss = layered.tail_loss(
                hidden_ND,
                positions_N=labels_N,
                next_N=labels_N,
                num_items=torch.tensor(float(num_tokens)),
                gradient_ND=gradient_ND,
            )
        losses.append(loss)
        gradients.append(gradient_ND.double())
        products = sum(counted.num_bytes[name] for name in ("mm", "embedding"))
        moved.append((counted.total_bytes - products) / (num_tokens * vocab * 2))
        num_fused.append(counted.num_ops["cross_entropy"])
    assert num_fused == [0, 1]
    assert 2.0 < moved[1] < 2.3  # logits in, their gradient out
    assert moved[0] > 18
    assert losses[1] == pytest.approx(float(losses[0]), rel=1e-5)
    assert rel_error({"": gradients[1]}, {"": gradients[0]}) < 0.01


@pytest.mark.thorough
def test_recomputes_of_fused_layers_leave_out_what_those_of_plain_ones_do() -> None:
    model = tiny("qwen3")
    unread = []
    for options in (OPTIONS, FUSED):
        engine = Engine(copy.deepcopy(model), device=torch.device("cpu"), options=options)
        engine.forward_backward(micro_batches(), dropout_seed=0)
        unread.append(engine.unread)
        engine.close()
    assert unread[0] == unread[1]
    assert all(unread[0])


@pytest.mark.thorough
def test_between_visits_and_for_another_model_of_its_class_the_code_is_the_models_own() -> None:
    first: Any = tiny("qwen3")
    second: Any = tiny("qwen3")
    forward = type(second.get_base_model().model.layers[0].self_attn).forward
    rotate = forward.__globals__["apply_rotary_pos_emb"]
    engine = Engine(first, device=torch.device("cpu"), options=FUSED)
    engine.forward_backward(micro_batches(), dropout_seed=0)
    layers = [model.get_base_model().model.layers for model in (first, second)]
    assert all("forward" not in vars(m) for stack in layers for m in stack.modules())
    assert forward.__globals__["apply_rotary_pos_emb"] is rotate
    with Counted() as plain, torch.no_grad():
        second(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert "norm" not in plain.num_ops
    engine.detach()
    with Counted() as detached, torch.no_grad():
        first(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert detached.num_ops == plain.num_ops


def test_a_visit_that_fails_leaves_the_models_own_code_behind() -> None:
    model = tiny("qwen3")
    layered = LayeredModel(model)
    layered.fuse()
    assert layered.fused is not None
    fused = layered.fused

    def fail() -> None:
        with fused.visited(0):
            assert "forward" in vars(layered.layers[0].input_layernorm)
            assert "forward" not in vars(layered.layers[1].input_layernorm)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all("forward" not in vars(module) for module in layered.layers.modules())


def test_a_hook_on_an_activation_keeps_its_calls() -> None:
    model: Any = tiny("qwen3")
    calls = []
    layer = model.get_base_model().model.layers[1]
    layer.mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    layered = LayeredModel(model)
    layered.fuse()
    assert layered.fused is not None
    with layered.fused.visited(1):
        layer.mlp(torch.randn(1, 2, SHAPE["hidden_size"]))
    assert calls
