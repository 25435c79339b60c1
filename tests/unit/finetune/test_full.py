"""Full training: which weights train, their masters and updates, and what is saved."""

import copy
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from bitsandbytes.optim.lion import Lion
from safetensors.torch import load_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from finetune.data.chat_template import Stops
from finetune.errors import ConfigError
from finetune.full import optimizer
from finetune.full.optimizer import HostOptimizer, joined, low_type, split_into, total_norm
from finetune.full.weights import choose_weights, counted, save_model
from finetune.model.empty import empty_of
from finetune.planning.request import facts_of
from finetune.recipe.sections import ModelSection
from offload.engine.model.layers import find_towers
from offload.plan.facts.trainable import EMBEDDING, NORMS, all_weights
from tests.parity.steps import SHAPE
from tests.published import publish
from tests.tiers import mostly_slow

TINY = ModelSection(config="tiny-qwen3", init="random", dtype="float32")
TINY_MOE = ModelSection(config="tiny-qwen3-moe", init="random", dtype="float32")


@pytest.mark.parametrize("section", [TINY, TINY_MOE])
def test_a_star_counts_what_the_facts_count(section: ModelSection) -> None:
    found, facts = counted(section, ("*",)), facts_of(section)
    expected = all_weights(facts)
    assert found.layers == expected.layers
    assert dict(found.outer) == dict(expected.outer)


def test_patterns_choose_by_whole_names() -> None:
    model = empty_of(TINY)
    choose_weights(model, ["model.layers.1.*", "model.norm.weight"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "model.norm.weight" in trained
    assert all(name.startswith("model.layers.1.") for name in trained - {"model.norm.weight"})
    found = counted(TINY, ("model.layers.1.*", "model.norm.weight"))
    assert [number > 0 for number in found.layers] == [i == 1 for i in range(len(found.layers))]
    assert set(dict(found.outer)) == {NORMS}


def test_a_tied_embedding_is_counted_once() -> None:
    model = empty_of(TINY)
    assert model.config.tie_word_embeddings
    found = counted(TINY, ("model.layers.0.*", "model.embed_tokens.weight"))
    size = model.config.vocab_size * model.config.hidden_size
    assert dict(found.outer) == {EMBEDDING: size}


def test_weights_outside_of_layers_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="chooses no weight of a layer"):
        counted(TINY, ("model.norm.weight",))


def names_of(model: object, what: list[str]) -> set[str]:
    choose_weights(model, what)  # type: ignore[arg-type]
    return {name for name, p in model.named_parameters() if p.requires_grad}  # type: ignore[attr-defined]


def with_biases() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )


def test_groups_choose_biases_norms_and_last_layers() -> None:
    model = with_biases()
    attention = ("q_proj", "k_proj", "v_proj")
    biases = {f"model.layers.{n}.self_attn.{name}.bias" for n in range(3) for name in attention}
    assert names_of(model, ["biases"]) == biases
    ends = ("input_layernorm", "post_attention_layernorm")
    norms = {f"model.layers.{n}.{end}.weight" for n in range(3) for end in ends}
    assert names_of(model, ["norms"]) == norms | {"model.norm.weight"}
    assert names_of(model, ["norms", "biases"]) == norms | biases | {"model.norm.weight"}
    last = {
        n for n, _ in model.named_parameters() if n.startswith(("model.layers.1", "model.layers.2"))
    }
    assert names_of(model, ["last_2_layers"]) == last
    assert names_of(model, ["last_2_layers", "lm_head.*"]) == last | {"lm_head.weight"}


def test_norms_of_queries_and_keys_are_counted() -> None:
    model = empty_of(TINY)
    norms = names_of(model, ["norms"])
    assert "model.layers.0.self_attn.q_norm.weight" in norms
    found = counted(TINY, ("norms",))
    assert found.num_parameters == sum(
        p.numel() for name, p in model.named_parameters() if "norm" in name
    )


@pytest.mark.parametrize(
    ("group", "limit"),
    [("biases", "weights only"), ("last_99_layers", r"it has \d+ layers")],
)
def test_a_group_that_a_model_does_not_have_is_refused(group: str, limit: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.what: {group}(.|\n)*{limit}"):
        choose_weights(empty_of(TINY), [group])


# ----------------------------------------------------------------------------------- host optimizer


SHAPES = {"matrix": (111, 53), "stack": (3, 37, 53), "vector": (41,)}


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def optimizer_of(
    weights: dict[str, torch.Tensor], *, name: str = "adamw", weight_decay: float = 0.0
) -> HostOptimizer:
    return HostOptimizer(weights, name=name, weight_decay=weight_decay)


def rounding(library: Any, state: str, groups: Any, **options: Any) -> torch.optim.Optimizer:
    """Return a library's optimizer whose state is rounded to bfloat16 after each step."""
    optimizer: torch.optim.Optimizer = library(groups, **options)

    def round_state(*_: Any) -> None:
        for states in optimizer.state.values():
            states[state].copy_(states[state].bfloat16())

    optimizer.register_step_post_hook(round_state)
    return optimizer


def masters(optimizer: HostOptimizer) -> dict[str, torch.Tensor]:
    """Return fp32 copies of the weights, put together where they are split."""
    found = optimizer.tensors
    return {
        name: joined(value, found[f"{name}:low"]) if f"{name}:low" in found else value.clone()
        for name, value in found.items()
        if ":" not in name
    }


LIBRARY: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adamw_bf16": partial(rounding, partial(torch.optim.AdamW, fused=True), "exp_avg"),
    "adamw_8bit": AdamW8bit,
    "adafactor": partial(torch.optim.Adafactor, eps=(None, 1.0)),
    "lion": Lion,
    "lion_bf16": partial(rounding, Lion, "state1"),
    "sgd": torch.optim.SGD,
}
# torch's AdamW divides by other roundings than bitsandbytes', so that codes of moments differ
ERRORS: dict[str, float] = {"adamw_8bit": 2e-3, "sgd": 1e-6, "lion": 1e-6, "lion_bf16": 1e-6}


@pytest.mark.parametrize("piece_elements", [256, 2**18])
@pytest.mark.parametrize("name", list(LIBRARY))
def test_reorder_it_is_the_librarys_optimizer(
    name: str, piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "PIECE_ELEMENTS", piece_elements)
    plain = {key: nn.Parameter(value) for key, value in drawn(0).items()}
    groups: list[dict[str, Any]] = [
        {"params": [plain["matrix"], plain["stack"]]},
        {"params": [plain["vector"]], "weight_decay": 0.0},
    ]
    reference = LIBRARY[name](groups, lr=0.0, weight_decay=0.1)
    ours = optimizer_of(drawn(0), name=name, weight_decay=0.1)
    for number in range(1, 8):
        for group in reference.param_groups:
            group["lr"] = 0.01 * number
        for key, gradient in drawn(number).items():
            plain[key].grad = gradient * 0.5
        reference.step()
        ours.update(drawn(number), num_updates=number, lr=0.01 * number, scale=0.5)
        for key, value in masters(ours).items():
            error = (value - plain[key]).norm() / plain[key].norm()
            assert error <= ERRORS.get(name, 0.0), (number, key)


@pytest.mark.parametrize("name", list(LIBRARY))
def test_a_resume_goes_on_where_the_states_were(name: str) -> None:
    whole, begun, resumed = (optimizer_of(drawn(0, torch.bfloat16), name=name) for _ in range(3))
    for number in range(1, 6):
        for one in (whole, begun if number < 3 else resumed):
            one.update(drawn(number), num_updates=number, lr=1e-3, scale=1.0)
        if number == 2:
            for key, tensor in begun.tensors.items():
                resumed.tensors[key].copy_(tensor)
    assert all(torch.equal(value, resumed.tensors[key]) for key, value in whole.tensors.items())


@pytest.mark.parametrize("num_steps", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_move_split_masters_are_an_fp32_master_to_the_bit(num_steps: int) -> None:
    started = drawn(0, torch.bfloat16)
    whole = optimizer_of({n: v.float() for n, v in started.items()}, weight_decay=0.01)
    split = optimizer_of({n: v.clone() for n, v in started.items()}, weight_decay=0.01)
    for number in range(1, num_steps + 1):
        gradients = drawn(number, torch.bfloat16)
        for one in (whole, split):
            one.update(gradients, num_updates=number, lr=1e-4, scale=0.7)
    found = masters(split)
    assert all(torch.equal(found[name], value) for name, value in masters(whole).items())
    assert any(not torch.equal(split.tensors[n], v) for n, v in started.items())
    for name, value in found.items():  # ties aside, what computes is rounded as torch does
        is_tie = (value.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(split.tensors[name][~is_tie], value.bfloat16()[~is_tie])


def test_updates_that_bfloat16_cannot_hold_are_kept() -> None:
    one = optimizer_of({"w": torch.ones(1, 8, dtype=torch.bfloat16)}, weight_decay=0.0)
    for number in range(1, 101):
        one.update({"w": torch.ones(1, 8)}, num_updates=number, lr=1e-4, scale=1.0)
    assert masters(one)["w"].tolist()[0] == pytest.approx([0.99] * 8, rel=1e-4)
    assert one.tensors["w"].tolist()[0] == [torch.tensor(0.99).bfloat16().item()] * 8


@pytest.mark.parametrize(("name", "wide"), [("adamw_bf16", "adamw"), ("lion_bf16", "lion")])
def test_a_mean_in_bfloat16_follows_and_falls_as_one_in_float32(name: str, wide: str) -> None:
    """After large gradients come none; squares, in float32, fall by a part in 1,000 per step."""
    reduced, whole = (optimizer_of({"w": torch.zeros(64, 64)}, name=n) for n in (name, wide))
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for number in range(1, 201):
        scale = 1.0 if number <= 100 else 0.0
        for one in (reduced, whole):
            one.update({"w": gradient.clone()}, num_updates=number, lr=1e-3, scale=scale)
        if number == 100:
            expected = whole.tensors["w:mean"]
            assert ((reduced.tensors["w:mean"] - expected).abs() <= 0.25 * expected.abs()).all()
    mean = reduced.tensors["w:mean"]
    assert mean.dtype is torch.bfloat16
    assert mean.abs().max() <= 0.4 * gradient.abs().max()
    if name == "adamw_bf16":
        squares = reduced.tensors["w:square"]
        assert squares.dtype is torch.float32
        assert torch.equal(squares, whole.tensors["w:square"])


def test_forgetting_makes_it_new() -> None:
    used, new = optimizer_of(drawn(0), weight_decay=0.0), optimizer_of(drawn(0), weight_decay=0.0)
    used.update(drawn(1), num_updates=1, lr=0.0, scale=1.0)
    used.num_updates = 1
    used.forget()
    assert used.num_updates == 0
    assert all(torch.equal(value, new.tensors[name]) for name, value in used.tensors.items())


def test_the_total_norm_is_that_of_all_elements() -> None:
    gradients = drawn(3)
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
    assert total_norm(norms) == pytest.approx(float(flat.norm()), rel=1e-6)


# ------------------------------------------------------------------------------------- split master


PIECE = 2**19  # what is made of it stays in a cache


def split(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    master = bits.view(torch.float32)
    high = torch.empty(master.shape, dtype=torch.bfloat16)
    low = torch.empty(master.shape, dtype=torch.int16)
    split_into(master, high, low)
    return high, low


def patterns(start: int, num: int) -> torch.Tensor:
    """Return 32-bit patterns, counted from the smallest signed number."""
    first = start - 2**31
    return torch.arange(first, first + num, dtype=torch.int32)


def assert_undone(bits: torch.Tensor) -> None:
    high, low = split(bits)
    assert torch.equal(joined(high, low).view(torch.int32), bits)


def assert_nearest(bits: torch.Tensor) -> None:
    """Of finite masters: the high half is what arithmetic in integers rounds to."""
    magnitude, high = bits & 0x7FFFFFFF, split(bits)[0].view(torch.int16)
    expected = ((magnitude + 0x8000) >> 16).to(torch.int16)
    is_same = ((high & 0x7FFF) == expected) & ((high < 0) == (bits < 0))
    assert bool((is_same | (magnitude >= 0x7F800000)).all())


@pytest.mark.parametrize(
    "start",
    [0, 2**31 - 2**16, 2**32 - 2**18, 2**31 + 0x7F7F0000, 2**31 + 0x3F800000, 0x3F800000],
)
def test_move_patterns_at_the_edges(start: int) -> None:
    bits = patterns(start, min(2**18, 2**32 - start))
    assert_undone(bits)
    assert_nearest(bits)


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(16, marks=pytest.mark.slow),  # of a magnitude's 16 pieces another one each
    ],
)
def test_move_all_patterns(every: int) -> None:
    for number, start in enumerate(range(0, 2**32, every * PIECE)):
        bits = patterns(start + number % every * PIECE, PIECE)
        assert_undone(bits)
        assert_nearest(bits)


def test_ties_go_away_from_zero() -> None:
    tie = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32)
    high, low = split(torch.cat([tie, tie + torch.tensor(-(2**31), dtype=torch.int32)]))
    above = [1 + 1 / 128, 1 + 2 / 128]
    assert high.tolist() == [*above, *(-x for x in above)]
    assert low.tolist() == [-(2**15)] * 4
    assert tie.view(torch.float32).bfloat16().tolist() == [1.0, 1 + 2 / 128]  # to even


def test_rounding_is_that_of_torch_but_for_ties() -> None:
    bits = torch.randint(-(2**31), 2**31, (2**20,), dtype=torch.int64).to(torch.int32)
    bits = bits[bits.view(torch.float32).isfinite() & ((bits & 0xFFFF) != 0x8000)]
    high, _ = split(bits)
    assert torch.equal(high, bits.view(torch.float32).bfloat16())


def test_what_is_not_finite() -> None:
    """Named in the module's docstring: masters come back, but their high halves may look fine."""
    largest, nan_low, nan_ones, nan = 0x7F7FFFFF, 0x7F800001, 0x7FFFFFFF, 0x7FC00000
    bits = torch.tensor([largest, nan_low, nan_ones, nan], dtype=torch.int32)
    high, low = split(bits)
    assert math.isinf(high[0])
    assert math.isinf(high[1])
    assert high[2].item() == 0.0
    assert math.isnan(high[3])
    assert torch.equal(joined(high, low).view(torch.int32), bits)


# ------------------------------------------------------------------------------------- float16


@pytest.mark.parametrize(
    "start", [0, 2**31 - 2**16, 2**31 + 0x387F0000, 2**31 + 0x477F0000, 0x3F800000, 2**31]
)
def test_move_a_float16_weight_and_its_rest_are_the_master(start: int) -> None:
    bits = patterns(start, min(2**18, 2**32 - start))
    master = bits.view(torch.float32)
    master = master[master.isfinite()]
    weight = torch.empty(master.shape, dtype=torch.float16)
    low = torch.empty(master.shape, dtype=torch.int32)
    split_into(master, weight, low)
    assert torch.equal(weight, master.half())
    assert torch.equal(joined(weight, low).view(torch.int32), master.view(torch.int32))


def test_a_float16_weight_that_was_not_updated_has_a_rest_of_zeros() -> None:
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    weight = weight[weight.isfinite()]
    rest = torch.zeros(weight.shape, dtype=low_type(torch.float16))
    assert torch.equal(joined(weight, rest), weight.float())
    again = torch.ones_like(rest)
    split_into(joined(weight, rest), weight.clone(), again)
    assert not bool(again.any())


# --------------------------------------------------------------------------------------------- save


SIZES = {**SHAPE, "vocab_size": 64, "max_position_embeddings": 64, "head_dim": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OLD = {"transformers_version": "4.51.0", "torch_dtype": "bfloat16"}
TEXT = {**SIZES, "rope_theta": 5e5}
EXPERTS = {"num_local_experts": 2, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "older": {"model_type": "llama", **SIZES, **OLD, "rope_theta": 1e6, "rope_scaling": None},
    "scaled": {"model_type": "llama", **SIZES, **OLD, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "partial": {"model_type": "stablelm", **SIZES, **OLD, "rope_theta": 2e4},
    "newer": {
        **{"model_type": "qwen3", **SIZES, "dtype": "bfloat16"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "typeless": {"model_type": "qwen2", **SIZES, "rope_theta": 1e6},
    "quantised, with code": {
        **{"model_type": "qwen3", **SIZES, **OLD, "rope_theta": 1e6},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]},
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig"},
    },
    "whole composite": {
        **{"model_type": "gemma3", **OLD},
        "text_config": {**TEXT, **OLD, "rope_local_base_freq": 3e4, "sliding_window_pattern": 2},
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "text of a composite": {
        **{"model_type": "llama4", **OLD, "architectures": ["Llama4ForConditionalGeneration"]},
        "text_config": {**TEXT, "model_type": "llama4_text", "rope_scaling": LLAMA3, **EXPERTS},
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
}


CHANGED = {"architectures", "torch_dtype", "dtype", "quantization_config", "auto_map"}


def without_changed(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: without_changed(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if key not in CHANGED
    }


IMAGE_TEXT = ("gemma3", "kimi_k25", "lfm2_vl", "mistral3", "qwen3_vl_moe")


class _Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_tied_weights_trained_on_the_host_are_saved_once(tmp_path: Path) -> None:
    """On a card the trained tensor is not the one that the model computes with."""
    config: Any = Qwen3Config(**SHAPE, tie_word_embeddings=True)
    model: Any = Qwen3ForCausalLM(config)
    trained = {name: p.detach() + 1 for name, p in model.named_parameters()}
    tokenizer: Any = _Tokenizer()
    model.save_pretrained(tmp_path)
    save_model(
        model,
        trained,
        tokenizer,
        tmp_path / "model",
        section=ModelSection(path=str(tmp_path)),
        stops=Stops(trained=(), base=()),
    )
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == set(trained)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert all(torch.equal(p, trained[name]) for name, p in loaded.named_parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_is_the_published_one(name: str, tmp_path: Path) -> None:
    """In transformers 5's layout alone, older readers found no `rope_theta` (#41)."""
    published = PUBLISHED[name]
    plain = {key: value for key, value in published.items() if key != "quantization_config"}
    kind = CONFIG_MAPPING[published["model_type"]]
    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(kind, MODEL_FOR_CAUSAL_LM_MAPPING[kind])
    base = whole._from_config(kind.from_dict(copy.deepcopy(plain)))
    base.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(plain))
    section = ModelSection(path=str(tmp_path), dtype="float32")
    model: Any = empty_of(section)
    model.to_empty(device="cpu")
    for tower in find_towers(model):
        tower.to("meta")
    trained = {name: torch.zeros_like(p) for name, p in model.named_parameters() if not p.is_meta}
    tokenizer: Any = _Tokenizer()
    folder = tmp_path / "model"
    stops = Stops(trained=(), base=())
    if plain != published:
        (tmp_path / "config.json").write_text(json.dumps(published))
    save_model(model, trained, tokenizer, folder, section=section, stops=stops)
    found = json.loads((folder / "config.json").read_text())
    assert without_changed(found) == without_changed(published)
    assert found["architectures"] == published.get("architectures", [type(model).__name__])
    types = {key: "float32" for key in ("torch_dtype", "dtype") if key in published}
    assert {key: found[key] for key in ("torch_dtype", "dtype") if key in found} == types
    assert "bfloat16" not in json.dumps(found)
    assert not {"quantization_config", "auto_map"} & found.keys()
    before, after = (load_file(f / "model.safetensors") for f in (tmp_path, folder))
    assert before.keys() == after.keys()
    for key, tensor in after.items():
        is_tower = "vision" in key or "projector" in key
        assert torch.equal(tensor, before[key] if is_tower else torch.zeros_like(tensor)), key
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(model)
    assert loaded.dtype is torch.float32
    text, wanted = loaded.config.get_text_config(), model.config.get_text_config()
    assert text.rope_parameters == wanted.rope_parameters


@pytest.mark.parametrize("model_type", mostly_slow(IMAGE_TEXT, "kimi_k25"))
def test_all_weights_keep_the_names_of_their_base(model_type: str, tmp_path: Path) -> None:
    """`save_pretrained` calls the layers of kimi_k25's text model `blocks`."""
    base = publish(model_type, tmp_path / "base")
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    trained = {name: p.detach() + 1 for name, p in model.named_parameters()}
    for tower in find_towers(model):
        tower.to("meta")
    trained = {name: trained[name] for name, p in model.named_parameters() if not p.is_meta}
    section = ModelSection(path=str(base), dtype="float32")
    tokenizer: Any = _Tokenizer()
    stops = Stops(trained=(), base=())
    save_model(model, trained, tokenizer, tmp_path / "model", section=section, stops=stops)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("base", "model"))
    assert before.keys() == after.keys()
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    whole = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    kept = dict(whole.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained.get(name, kept[name])), name
    assert trained.keys() < kept.keys()
