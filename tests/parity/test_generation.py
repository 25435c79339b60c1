"""Generation with a key-value cache, against plain transformers' own with its own cache."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.engine.model.layers import LayeredModel
from offload.engine.passes.part import RunStep
from offload.errors import UnsupportedModelError
from tests.parity.architectures import exact_types
from tests.parity.generations import NUM_TOKENS, Answers, attached, generated, plain, prompts
from tests.parity.runs import ATTENTION, WIDE, joint_model
from tests.parity.steps import MODELS, micro_batches, tiny
from tests.parity.tiny_models import (
    SETTINGS,
    SHARED_INDICES,
    SHARED_KEYS,
    tiny_model,
    with_adapters,
)
from tests.tiers import mostly_slow, tiered

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_LAYERS = 4
CLOSE = 1e-4  # of the largest logit, to a pass over whole rows in float32


def assert_same(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for group, (logits_BTV, tokens) in expected.items():
        assert torch.equal(found[group][1], tokens)
        assert torch.equal(found[group][0].float(), logits_BTV)


# ------------------------------------------------------------------------------ what is computed


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "gemma3_text"))
def test_move_cached_logits_and_tokens_are_those_of_the_plain_model(name: str) -> None:
    model = tiny(name).eval()
    expected = plain(copy.deepcopy(model))
    with attached(model) as engine, engine.generation() as generation:
        assert_same(generated(generation, prompts()), expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", mostly_slow({"nf4": ({"codec": "nf4"},), "int8": ({"codec": "int8"},)}, "nf4")
)
def test_move_encoded_layers_generate_what_they_do_decoded(options: dict[str, Any]) -> None:
    model = tiny("qwen3").to(torch.bfloat16).eval()
    with attached(model, **options) as engine, engine.generation() as generation:
        found = generated(generation, prompts())
    assert_same(found, plain(model))  # detached: its weights are those that were decoded


@pytest.mark.slow
def test_move_fused_layers_generate_the_same_streamed_and_resident() -> None:
    answers = []
    for num_slots in (2, NUM_LAYERS):
        model = tiny("qwen3").eval()
        with (
            attached(model, num_slots=num_slots, layer_kernels="fused") as engine,
            engine.generation() as generation,
        ):
            answers.append(generated(generation, prompts()))
    for group, (logits_BTV, tokens) in answers[0].items():
        assert torch.equal(logits_BTV, answers[1][group][0])
        assert torch.equal(tokens, plain(tiny("qwen3").eval())[group][1])


@pytest.mark.thorough
def test_move_a_group_that_joins_later_or_waits_is_computed_as_if_alone() -> None:
    model = tiny("qwen3").eval()
    with attached(model) as engine:
        with engine.generation() as generation:
            expected = generated(generation, prompts())
        with engine.generation() as generation:
            first, second = prompts().values()
            tokens = {g: answers[1] for g, answers in expected.items()}
            found = {0: [generation.next_logits({0: first})[0]], 1: []}
            for i in range(NUM_TOKENS - 1):
                given = {0: tokens[0][:, i : i + 1]}
                if i:
                    given[1] = second if i == 1 else tokens[1][:, i - 2 : i - 1]
                for group, logits_BV in generation.next_logits(given).items():
                    found[group].append(logits_BV)
    for group, steps in found.items():
        logits_BTV = torch.stack(steps, 1)
        assert torch.equal(logits_BTV, expected[group][0][:, : logits_BTV.shape[1]])


# --------------------------------------------------------------------------------- architectures

UNCACHED = {
    "bailing_hybrid": "fails when it is passed a cache",  # tiny, with no layer of attention
    "evolla": "takes no key-value cache",
    "kimi_linear": "fails when it is passed a cache",  # as before
    "minimax": "takes no key-value cache",
    "openai-gpt": "takes no key-value cache",
    "paligemma": "gives other logits with a cache than without one",
    "recurrent_gemma": "keeps `.*` of its layers outside its cache",
    "rwkv": "takes no key-value cache",
    "xlstm": "takes no key-value cache",
}
ROUNDED = {  # the same tokens; logits differ in the last bits
    *("minicpm_ocr", "minicpmv4_6", "mpt", "nemotron_h_omni", "qwen2_5_omni_thinker"),
    *("qwen3_omni_moe_thinker", "video_llama_3"),
    # transformers leaves all but a prompt's last token out of layers that share keys and values
    *(name for name in SETTINGS if SHARED_KEYS in name),
}
OWN_POSITIONS = {  # counted from the padding token; `generate` passes others than the model's own
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl"),
}
EXACT = exact_types(images=True)


@pytest.mark.parametrize(
    "model_type",
    tiered(
        EXACT,
        default=("recurrent_gemma", "roberta"),
        slow=(
            "mamba2",
            "qwen3_next",
            "bamba",
            "deepseek_v3",
            "gemma4_text",
            "gpt2",
            "gpt_oss",
            f"glm_moe_dsa, {SHARED_INDICES}",
            "lfm2",
            "mistral3",
            "qwen3_vl",
            "rwkv",
            "zamba2",
            "zaya",
        ),
    ),
)
def test_move_each_type_generates_as_transformers_does_or_is_refused(model_type: str) -> None:
    base = tiny_model(model_type)
    model = with_adapters(base, LayeredModel(base).layers).eval()
    reference = copy.deepcopy(model)
    with attached(model) as engine:
        if model_type in UNCACHED:
            with pytest.raises(offload.UnsupportedModelError, match=UNCACHED[model_type]):
                generated(engine.generation(), prompts())
            return
        with engine.generation() as generation:
            found = generated(generation, prompts())
    if model_type in ROUNDED:
        for group, (logits_BTV, tokens) in plain(reference).items():
            assert torch.equal(found[group][1], tokens)
            assert torch.allclose(found[group][0], logits_BTV, rtol=0, atol=CLOSE)
        return
    if model_type not in OWN_POSITIONS:
        assert_same(found, plain(reference))
        return
    if model_type == "roberta-prelayernorm":
        pytest.xfail("the second row goes on with the padding token, which it does not number")
    for group, (logits_BTV, tokens) in found.items():
        input_ids = torch.cat([prompts()[group], tokens], 1)[:, :-1]
        with torch.no_grad():
            whole_BTV = reference(input_ids=input_ids, use_cache=False).logits[:, -NUM_TOKENS:]
        assert float((logits_BTV - whole_BTV).abs().max()) <= CLOSE * float(whole_BTV.abs().max())


# ----------------------------------------------------------------------------------------- loads


@pytest.mark.thorough
@pytest.mark.parametrize(("num_slots", "num_loads"), [(2, 4), (3, 2), (4, 0)])
def test_a_pass_loads_no_layer_that_is_still_in_its_slot(num_slots: int, num_loads: int) -> None:
    """Of 4 layers in C slots, 2 * C - 4 have a slot of their own and stay."""
    model = tiny_model("llama").eval()
    with attached(model, num_slots=num_slots) as engine, engine.generation() as generation:
        given = prompts()
        for number in range(3):
            before = generation.num_loads
            logits = generation.next_logits(given)
            given = {group: x.argmax(-1, keepdim=True) for group, x in logits.items()}
            assert number == 0 or generation.num_loads - before == num_loads


# ---------------------------------------------------------------------------------------- refused


class Lasting(nn.Module):
    """Adds what it was called with before: state outside of a cache."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach()
        return self.inner(x)


def test_a_layer_that_keeps_something_outside_its_cache_is_refused() -> None:
    model: Any = tiny_model("llama").eval()
    model.model.layers[1].mlp = Lasting(model.model.layers[1].mlp)
    with (
        attached(model) as engine,
        engine.generation() as generation,
        pytest.raises(offload.UnsupportedModelError, match=r"keeps `1\.mlp\.seen` of its layers"),
    ):
        generated(generation, prompts())


def test_a_model_that_uses_its_cache_after_its_layers_is_refused() -> None:
    model: Any = tiny_model("llama").eval()
    caches: list[Any] = []

    def note(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        caches[:] = [kwargs.get("cache", kwargs.get("past_key_values"))]

    def use(*_: Any) -> None:
        if caches and caches[0] is not None:
            caches[0].get_seq_length()

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    model.model.norm.register_forward_pre_hook(use)
    with (
        attached(model) as engine,
        engine.generation() as generation,
        pytest.raises(offload.UnsupportedModelError, match="uses its cache between or after"),
    ):
        generated(generation, prompts())


def test_caches_of_other_weights_or_modes_or_rows_are_refused() -> None:
    model = tiny("qwen3").eval()
    given = prompts()
    with attached(model) as engine:
        with engine.generation() as generation:
            generation.next_logits(given)
            with pytest.raises(
                offload.OffloadError, match="group 0 is given 1 rows, and its cache"
            ):
                generation.next_logits({0: given[0][:1, :1]})
            model.train()
            with pytest.raises(offload.OffloadError, match="in training mode"):
                generation.next_logits({0: given[0][:, :1]})
            model.eval()
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).add_(1.0)
            with pytest.raises(offload.OffloadError, match="parameters or the adapter changed"):
                generation.next_logits({0: given[0][:, :1]})
        with pytest.raises(offload.OffloadError, match="after it was closed"):
            generation.next_logits(given)
        assert not generation.cache_bytes


def test_move_a_generation_goes_on_while_another_adapter_learns() -> None:
    model = joint_model("qwen3", [ATTENTION, WIDE]).eval()
    with attached(model) as engine:
        learn = [p for name, p in engine.trained_parameters.items() if ".run1." in name]
        for parameter in learn[::2]:
            parameter.detach().zero_()  # as a new adapter's B: its inspection tries others
        with engine.using("run0"), engine.generation() as generation:
            expected = generated(generation, prompts())
        with engine.using("run0"):
            generation = engine.generation()
        tokens, found = {g: one[1] for g, one in expected.items()}, list[dict[int, torch.Tensor]]()
        for i in range(NUM_TOKENS):
            given = {g: t[:, i - 1 : i] for g, t in tokens.items()} if i else prompts()
            with engine.using("run0"):
                found.append(generation.next_logits(given))
            engine.forward_backward_runs([RunStep(micro_batches=micro_batches(), adapter="run1")])
            torch.optim.SGD(learn, lr=0.1).step()
        for group, (logits_BTV, _) in expected.items():
            assert torch.equal(torch.stack([one[group] for one in found], 1), logits_BTV)


def test_a_generation_ends_when_its_own_adapter_learns() -> None:
    model = joint_model("qwen3", [ATTENTION, WIDE]).eval()
    with attached(model) as engine, engine.using("run0"), engine.generation() as generation:
        first = {group: generation.next_logits(prompts())[group].argmax(-1, True) for group in (0,)}
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if ".run0." in n).add_(1.0)
        with pytest.raises(offload.OffloadError, match="parameters or the adapter changed"):
            generation.next_logits(first)


@pytest.mark.thorough
def test_a_step_after_a_generation_is_the_step_without_it() -> None:
    losses = []
    for generates in (False, True):
        model = tiny("qwen3")
        with attached(model) as engine:
            if generates:
                model.eval()
                with engine.generation() as generation:
                    generated(generation, prompts())
                model.train()
            losses.append(engine.forward_backward(micro_batches(), dropout_seed=0).loss)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            losses.append(sum(float(g.double().square().sum()) for g in gradients))
    assert losses[:2] == losses[2:]


# ---------------------------------------------------------- rows of unequal length, repeated

RAGGED = ("llama", "gemma3_text", "qwen3_next", "gpt_oss")


@pytest.mark.parametrize("model_type", tiered(RAGGED, default=("gemma3_text",), slow=RAGGED[2:]))
def test_move_padded_and_repeated_rows_are_near_those_of_each_alone(model_type: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 64, (1, num), generator=generator) for num in (5, 11, 3)]
    model = tiny_model(model_type).eval()
    padding = torch.tensor([6, 0, 8])
    padded = [torch.full((1, num), 7) for num in padding.tolist()]
    ids_BT = torch.cat([torch.cat(both, 1) for both in zip(padded, rows, strict=True)])
    more = torch.randint(3, 64, (6, NUM_TOKENS), generator=generator)
    with attached(model) as engine, engine.generation() as generation:
        firsts = generation.next_logits({0: ids_BT}, padding={0: padding})[0]
        generation.repeat(0, 2)
        found = [firsts.repeat_interleave(2, 0)]
        found += [generation.next_logits({0: more[:, i : i + 1]})[0] for i in range(NUM_TOKENS)]
    for row in range(6):
        with torch.no_grad():
            ids = torch.cat([rows[row // 2], more[row : row + 1]], 1)
            expected = model(input_ids=ids).logits[0, -NUM_TOKENS - 1 :]
        ours = torch.stack([logits_BV[row] for logits_BV in found])
        assert (ours - expected).abs().max() <= CLOSE * expected.abs().max()
    assert not torch.equal(found[1][0], found[1][1])  # other tokens follow


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("bloom", "takes no positions of rows"),
        ("deepseek_v4", "other logits to a padded row than to it alone"),
    ],
)
def test_move_models_whose_rows_cannot_be_padded_are_refused(model_type: str, what: str) -> None:
    model = tiny_model(model_type).eval()
    ids_BT = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with (
        attached(model) as engine,
        engine.generation() as generation,
        pytest.raises(UnsupportedModelError, match=what),
    ):
        generation.next_logits({0: ids_BT}, padding={0: torch.tensor([3, 0])})
