"""Every type of language model: exact or refused, loaded as published, its towers left out."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

import offload
from finetune.adapter.lora import add_lora
from finetune.errors import ModelError
from finetune.model.checkpoint import load_published
from offload.engine.model import placement
from offload.engine.model.layers import LayeredModel, find_towers
from tests.builders import adapter
from tests.checkpoints import loaded
from tests.parity.architectures import (
    IN_LIBRARY,
    ROUNDED,
    ROW_LENS,
    TOGETHER,
    Verdict,
    causal_types,
    gradients,
    image_text_types,
    is_rounding,
    micro_batches,
    plain,
    read_table,
    rel_error,
    rows_alone_and_packed,
    streamed,
    verdict_of,
    write_table,
)
from tests.parity.tiny_models import SETTINGS, SPECIAL, small, tiny_model, with_adapters
from tests.tiers import mostly_slow

TABLE = read_table(Path(__file__).parents[2] / "docs" / "architectures.md")
NUM_EXACT, NUM_TOGETHER, NUM_IMAGES_EXACT = 173, 122, 66  # ratchets
SAMPLE = (
    "bamba",  # mamba and attention
    "bart",  # a loss that is not shifted
    "bloom",  # layers that return tuples, attention biases
    "deepseek_v3",  # latent attention, dense and experts
    "gemma4_text",  # an input of its own for each layer, a container that layers could share
    "gpt2",
    "gpt_oss",
    "inkling2_text",  # a tail that reads hidden states of earlier layers
    "llama",
    "mamba2",  # no attention
    "qwen3_moe",
    "qwen3_next",  # linear and full attention, experts
    "rwkv",  # layers that return a state
    "zamba2",  # parameters that layers share
    "zaya",  # routers that hand their state on to the next layer
)
SAMPLE_IMAGES = (
    "glm5_next",
    "idefics3",  # its decoder is called otherwise
    "kimi_k25",
    "minimax_m3_vl",
    "mistral3",
    "pix2struct",  # an encoder with a decoder
    "qwen3_vl_moe",
)


ALL = [*causal_types(), *SETTINGS, *image_text_types()]


def check(model_type: str) -> None:
    committed = {**TABLE.verdicts, **TABLE.images}.get(model_type)
    found = verdict_of(model_type)
    if committed is not None and transformers.__version__ == TABLE.transformers:
        # An error near the limit may fall on either side of it, depending on the processor.
        assert _limit_aside(found) == _limit_aside(committed)


def _limit_aside(verdict: Verdict) -> Verdict:
    return replace(verdict, packs=verdict.packs.removesuffix(ROUNDED))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "model_type",
    mostly_slow(
        [name for name in (*SAMPLE, *SETTINGS, *SAMPLE_IMAGES) if name in ALL],
        *("bloom", "idefics3", "mistral3", "pix2struct"),
    ),
)
def test_reorder_a_sample_of_types_is_exact_or_refused_as_committed(model_type: str) -> None:
    check(model_type)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ALL)
def test_reorder_each_type_is_exact_or_refused_as_committed(model_type: str) -> None:
    check(model_type)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["glm4", "gemma4_unified_text", "deepseek_v4"])
def test_packed_rows_are_apart_by_rounding_and_not_if_a_row_sees_another(model_type: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = tiny_model(model_type)
        model = with_adapters(base, LayeredModel(base).layers)
        alone, packed = rows_alone_and_packed()
        assert is_rounding(model, alone, packed)
        first, second, third = ROW_LENS[0]
        packed[0]["row_lens"] = torch.tensor([first, second + third])
        packed[0]["labels"][0, first + second] = -100  # as many labels, but another context
        assert not is_rounding(model, alone, packed)


@pytest.mark.usefixtures("one_thread")
def test_the_table_lists_every_type_of_its_version() -> None:
    if transformers.__version__ == TABLE.transformers:
        assert TABLE.verdicts.keys() == {*causal_types(), *SETTINGS}
        assert TABLE.images.keys() == set(image_text_types())
    every = [*TABLE.verdicts.values(), *TABLE.images.values()]
    reasons = [verdict.reason or IN_LIBRARY for verdict in every if verdict.is_exact]
    assert all(reason.startswith(IN_LIBRARY) for reason in reasons)
    assert all(verdict.reason or verdict.is_exact for verdict in every)


@pytest.mark.usefixtures("one_thread")
def test_the_table_never_has_fewer_exact_types() -> None:
    assert sum(verdict.is_exact for verdict in TABLE.verdicts.values()) >= NUM_EXACT
    assert sum(verdict.is_exact for verdict in TABLE.images.values()) >= NUM_IMAGES_EXACT


@pytest.mark.usefixtures("one_thread")
def test_every_exact_type_packs_and_never_fewer_compute_their_rows_together() -> None:
    assert all(bool(verdict.packs) == verdict.is_exact for verdict in TABLE.verdicts.values())
    together = [v for v in TABLE.verdicts.values() if v.packs.startswith(TOGETHER)]
    assert len(together) >= NUM_TOGETHER


@pytest.mark.usefixtures("one_thread")
def test_a_table_that_was_written_can_be_read(tmp_path: Path) -> None:
    verdicts = [
        Verdict(model_type="a-b", is_exact=True, packs="row by row"),
        Verdict(model_type="c_d", is_exact=False, reason="x | y; z"),
    ]
    path = tmp_path / "table.md"
    images = [Verdict(model_type="e_f", is_exact=True, packs="together")]
    path.write_text(write_table(verdicts, images))
    table = read_table(path)
    assert list(table.verdicts.values()) == verdicts
    assert list(table.images.values()) == images
    assert table.transformers == transformers.__version__
    assert "Of 2 causal language model types 1 are exact and 1 are refused." in path.read_text()


# ---------------------------------------------------------------------------- loading architectures


TYPES = sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})
NOT_SAVED = {"gemma4_assistant", "gemma4_unified_assistant"}  # their tiny configs are not valid
PARTS_ONLY = {"emu3", "mllama", "musicgen", "musicgen_melody"}  # no AutoModel loads what they save


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type", [name for name in TYPES if name not in PARTS_ONLY | NOT_SAVED]
)
def test_move_a_checkpoint_is_loaded_as_transformers_loads_it(
    model_type: str, tmp_path: Path
) -> None:
    tiny_model(model_type).bfloat16().save_pretrained(tmp_path, max_shard_size="30KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = load_published(str(tmp_path), "bfloat16")
    assert type(found) is type(expected)
    assert found.config.to_dict() == expected.config.to_dict()
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name
            assert ours[name].requires_grad == tensor.requires_grad, name


# --------------------------------------------------------------------------------------- composites


WHOLE = ("gemma3", "gemma4")  # AutoModelForCausalLM builds them with their towers
TEXT_PART = ("qwen3_5", "qwen3_5_moe", "llama4")  # and of these the text part alone


@pytest.fixture
def quiet(one_thread: None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def composite(model_type: str) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    torch.manual_seed(0)
    model = model_class._from_config(small(config_class, SPECIAL.get(model_type, {})))
    assert isinstance(model, PreTrainedModel)
    return model.requires_grad_(False)


def published(model_type: str, folder: Path) -> Any:
    """Return what `AutoModelForCausalLM` makes of a checkpoint as such models are published."""
    composite(model_type).save_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    return model.requires_grad_(False).train()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("model_type", mostly_slow([*WHOLE, *TEXT_PART], TEXT_PART[0]))
def test_the_text_of_a_published_composite_trains_exactly(model_type: str, tmp_path: Path) -> None:
    base = published(model_type, tmp_path)
    layered = LayeredModel(base)
    assert bool(layered.towers) is (model_type in WHOLE)
    model = with_adapters(base, layered.layers)
    batches = micro_batches()
    loss, ours = streamed(model, batches, num_slots=2)
    resident_loss, resident = streamed(model, batches, num_slots=8)
    plain_loss, reference = plain(model, batches)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in ours)
    assert loss == pytest.approx(plain_loss, rel=2e-6)
    assert rel_error(ours, reference) < 2e-6


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("model_type", mostly_slow(TEXT_PART, TEXT_PART[0]))
def test_a_text_part_has_the_weights_of_the_whole(model_type: str, tmp_path: Path) -> None:
    base = published(model_type, tmp_path)
    whole = {
        name.replace("language_model.", "").replace("model.", ""): tensor
        for name, tensor in composite(model_type).state_dict().items()
    }
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, whole[name.replace("model.", "")]), name


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("model_type", WHOLE)
def test_towers_stay_where_they_are_when_the_rest_moves(model_type: str) -> None:
    layered = LayeredModel(composite(model_type))
    towers = {id(p) for tower in layered.towers for p in tower.parameters()}
    moved = placement.modules_on_device(layered)
    on_device = {id(p) for module in moved for p in module.parameters(recurse=False)}
    assert towers
    assert not towers & on_device
    assert towers | on_device == {id(parameter) for parameter in layered.model.parameters()}
    names = [name for name, p in layered.model.named_parameters() if id(p) in towers]
    assert not any("language_model" in name or "lm_head" in name for name in names)


@pytest.mark.usefixtures("quiet")
@pytest.mark.thorough
@pytest.mark.parametrize("tier", mostly_slow(["ram", "disk"], "disk"))
def test_a_loaded_composite_keeps_no_tower_in_memory_and_trains(
    tier: Literal["ram", "disk"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    composite("gemma3").save_pretrained(folder)
    base = loaded(folder, tier)
    towers = find_towers(base.model)
    assert towers
    assert {p.device.type for tower in towers for p in tower.parameters()} == {"meta"}
    model = add_lora(base.model, adapter(), seed=0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(".layers." in name and "vision_tower" not in name for name in trained)
    engine = offload.attach(model, num_slots=2, device="cpu", backing=base.backing)
    batches = micro_batches()
    loss = engine.forward_backward(batches).loss
    found = gradients(model)
    engine.detach()
    plain_loss, reference = plain(model.train(), batches)
    assert loss == pytest.approx(plain_loss, rel=2e-6)
    assert rel_error(found, reference) < 2e-6


@pytest.mark.usefixtures("quiet")
@pytest.mark.thorough
@pytest.mark.parametrize("model_type", mostly_slow([*WHOLE, *TEXT_PART], WHOLE[0], TEXT_PART[0]))
def test_weights_of_towers_are_no_error_and_others_that_are_unknown_are(
    model_type: str, tmp_path: Path
) -> None:
    composite(model_type).save_pretrained(tmp_path)
    base = loaded(tmp_path)
    assert base.backing is not None
    base.backing.close()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "language_model" in name)
    tensors[f"{name}.unknown"] = torch.zeros(1)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="unknown to the model, 1 tensors"):
        loaded(tmp_path)


@pytest.mark.usefixtures("quiet")
def test_a_model_without_towers_has_none() -> None:
    base = composite("gemma3")
    text = AutoModelForCausalLM.from_config(base.config.get_text_config())
    assert LayeredModel(text).towers == []
