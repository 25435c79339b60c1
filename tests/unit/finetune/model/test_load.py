"""Checkpoints: found, fetched, complete, and loaded layer by layer as transformers loads them."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    FineGrainedFP8Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.quantization_config import Mxfp4Config

import offload
from finetune.errors import ModelError
from finetune.files.tensors import open_tensors
from finetune.model.checkpoint import join_experts, load_published
from finetune.model.empty import empty_of
from finetune.model.load import Loaded, load_model
from finetune.model.overflow import first_overflow
from finetune.model.store import store_path
from finetune.recipe.sections import ModelSection
from offload.engine.experts.autotune import find_experts
from offload.engine.experts.lora import SUFFIX
from offload.engine.experts.products import goes_through_interface
from offload.engine.host.slab import Slab
from offload.engine.model.capture import CaptureWeights
from offload.errors import TransferError
from offload.plan.machine.machine import ExpertsImplementation
from tests.checkpoints import (
    Pack,
    assert_same_model,
    pack_bnb_4bit,
    pack_fp8,
    pack_mxfp4,
    published_shapes,
    write_checkpoint,
)
from tests.checkpoints import load as load_model_of
from tests.checkpoints import loaded as load
from tests.parity.tiny_models import tiny_config
from tests.tiers import diagonal, mostly_slow

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    Qwen3ForCausalLM(Qwen3Config.from_dict(SHAPE)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_soft_caps_of_scores_are_computed(tmp_path: Path) -> None:
    """Fused attention has none, and some versions of transformers choose it all the same."""
    capped = Gemma2Config.from_dict(SHAPE | {"attn_logit_softcapping": 0.01})
    torch.manual_seed(0)
    made: Any = Gemma2ForCausalLM(capped)
    for layer in made.model.layers:  # scores of more than a cap
        layer.self_attn.q_proj.weight.data *= 100
    made.save_pretrained(tmp_path)
    tokens = torch.arange(12).view(1, 12)
    made.set_attn_implementation("eager")
    loaded: Any = load(tmp_path).model
    with torch.no_grad():
        right, found = made(tokens).logits, loaded(tokens).logits
        for layer in made.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        uncapped = made(tokens).logits
    assert torch.equal(found, right)
    assert not torch.allclose(uncapped, right, rtol=0, atol=1e-3)


def test_random_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        return next(random_moe("eager", seed=seed).parameters()).detach()

    torch.manual_seed(7)
    first, state = weights(1), torch.get_rng_state()
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))
    assert torch.equal(state, torch.get_rng_state())


def random_moe(way: ExpertsImplementation | None, *, seed: int = 0) -> PreTrainedModel:
    section = ModelSection(config="tiny-qwen3-moe", init="random", dtype="float32")
    return load_model(
        section,
        codec="native",
        device="cpu",
        seed=seed,
        tier="ram",
        experts_implementation=way,
    ).model


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_all_experts_compute_as_they_are_told(way: ExpertsImplementation) -> None:
    model = random_moe(way)
    experts = [module for module in model.modules() if goes_through_interface(module)]
    assert len(experts) == 4
    for module in experts:
        config: Any = module.config
        assert config._experts_implementation.removesuffix(SUFFIX) == way


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_are_known_before_the_model_is_loaded(
    dtype: Literal["bfloat16", "float32"],
) -> None:
    model = ModelSection(config="gpt-oss-20b", init="random", dtype=dtype)
    experts: Any = find_experts(empty_of(model))
    assert experts.gate_up_proj.shape == (32, 2880, 5760)
    assert experts.down_proj.dtype is getattr(torch, dtype)
    assert {p.device.type for p in experts.parameters()} == {"meta"}
    assert find_experts(empty_of(ModelSection(config="tiny-qwen3", init="random"))) is None


def test_a_missing_tensor_is_named(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors, such as model\.layers\.1\.mlp\.up"):
        load(model_dir)


def test_an_unexpected_tensor_is_named(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    tensors = {**load_file(file), "model.layers.0.mlp.extra.weight": torch.zeros(2)}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unknown to the model, 1 tensors, such as .*extra"):
        load(model_dir)


def test_weights_of_other_sizes_than_the_config_says_are_named(model_dir: Path) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 48}))
    with pytest.raises(ModelError, match=r"in other sizes than its config's, 6 tensors, such as"):
        load(model_dir)


def test_weights_that_are_cut_off_are_an_error_not_a_traceback(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is cut off or damaged"):
        load(model_dir)


# ------------------------------------------------------------------------------------------ loading


ROOT = Path(__file__).parents[4]
MIB = 2**20
LOADING_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LOADING_SHAPE)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**LOADING_SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LOADING_SHAPE)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**LOADING_SHAPE, **EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LOADING_SHAPE, num_local_experts=4)),
    "gemma3_text": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**LOADING_SHAPE, sliding_window=8)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=4, vocab_size=64)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**LOADING_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    ),
    # its routers stay in float32 whatever dtype is asked for
    "ernie4_5_moe": lambda: Ernie4_5_MoeForCausalLM(
        Ernie4_5_MoeConfig(**LOADING_SHAPE, moe_num_experts=4, moe_k=2, moe_intermediate_size=16)
    ),
}
Tier = Literal["ram", "disk"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "sluice" / "stores"
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def publish(model: PreTrainedModel, folder: Path, *, shard: str = "40KB", seed: int = 0) -> Path:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return publish(MODELS["qwen3"](), tmp_path / "qwen3")


def in_backing(loaded: Loaded) -> set[str]:
    """Return the names of the parameters that lie in the backing."""
    assert loaded.backing is not None
    names = {id(parameter): name for name, parameter in loaded.model.named_parameters()}
    num_layers = len(loaded.backing.records)
    loaded.backing.adopt([list(loaded.model.parameters())] * num_layers)
    return {names[id(f.parameter)] for record in loaded.backing.records for f in record.fields}


# ----------------------------------------------------------------------------------- the same model


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(
        itertools.product(MODELS, ["float32", "bfloat16"]),
        *(("gpt_oss", "bfloat16"), ("llama, tied", "float32"), ("qwen3_moe", "bfloat16")),
    ),
)
def test_a_model_is_loaded_as_transformers_loads_it(name: str, dtype: str, tmp_path: Path) -> None:
    path = publish(MODELS[name](), tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    in_layers = {key for key, _ in expected.named_parameters() if ".layers." in key or ".h." in key}
    for loaded in (
        load(path, "ram", dtype=dtype),
        load(path, "disk", dtype=dtype),
        load(path, "disk", dtype=dtype),
    ):
        assert_same_model(loaded.model, expected)
        assert in_backing(loaded) == in_layers


@pytest.mark.usefixtures("cache")
def test_a_checkpoint_that_is_published_in_another_dtype_is_loaded_alike(tmp_path: Path) -> None:
    path = publish(MODELS["qwen3_moe"]().bfloat16(), tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for tier in ("ram", "disk"):
        assert_same_model(load(path, tier).model, expected)


@pytest.mark.usefixtures("cache")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "tier"),
    mostly_slow(itertools.product(["qwen3", "qwen3_moe"], ["ram", "disk"]), ("qwen3_moe", "disk")),
)
def test_a_step_from_loaded_layers_equals_a_step_from_copied_layers(
    name: str, tier: Tier, tmp_path: Path
) -> None:
    path = publish(MODELS[name](), tmp_path / "model")
    batch = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}

    def step(loaded: Loaded) -> list[torch.Tensor]:
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        model = get_peft_model(loaded.model, config).train()
        engine = offload.attach(model, num_slots=2, device="cpu", backing=loaded.backing)
        if tier == "ram" and loaded.backing is not None:
            assert engine.slab_bytes == loaded.backing.num_bytes
        result = engine.forward_backward([batch])
        engine.detach()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [torch.tensor(result.loss), *grads]

    loaded = load(path, tier)
    copied = Loaded(model=load(path, "ram").model, backing=None)
    found, expected = step(loaded), step(copied)
    assert len(found) > 8
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("cache")
def test_layers_that_were_loaded_into_a_slab_are_not_copied_by_attach(qwen3: Path) -> None:
    loaded = load(qwen3, "ram")
    assert isinstance(loaded.backing, Slab)
    before = loaded.backing.layer(0).data_ptr()
    model = get_peft_model(loaded.model, LoraConfig(r=4, target_modules="all-linear"))
    frozen = [p for p in model.model.model.layers[0].parameters() if not p.requires_grad]
    addresses = {parameter.data_ptr() for parameter in frozen}
    engine = offload.attach(model, num_slots=2, device="cpu", backing=loaded.backing)
    record = loaded.backing.records[0]
    assert {before + field.offset for field in record.fields} == addresses
    assert {id(field.parameter) for field in record.fields} == set(map(id, frozen))
    engine.close()


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.usefixtures("cache")
@pytest.mark.thorough
@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks 1 tensors, such as .*up"),
        (lambda t: t.update({"model.layers.0.x": torch.zeros(2)}), r"unknown to the model, 1 .*x"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(3, 3)}),
            r"in other sizes than its config's, 1 tensors, such as .*2\.mlp\.up",
        ),
    ],
)
def test_tensors_that_do_not_match_are_named_and_no_store_is_left(
    tier: Tier, change: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    path = publish(MODELS["qwen3"](), tmp_path / "model", shard="1GB")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(path, tier)
    assert not store_path(str(path), "float32", "native").exists()


@pytest.mark.usefixtures("cache")
def test_a_shard_that_is_cut_off_is_a_named_error(qwen3: Path, cache: Path) -> None:
    shard = sorted(qwen3.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 100)
    for tier in ("ram", "disk"):
        with pytest.raises(ModelError, match=rf"{shard.name} is cut off or damaged"):
            load(qwen3, tier)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


# -------------------------------------------------------------------------------------------- store


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_transformers_that_marks_nothing_is_noticed(
    tier: Tier, qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("load", "store"):
        monkeypatch.setattr(f"finetune.model.{module}.is_loaded", lambda _: False)
    if tier == "disk":
        with pytest.raises(ModelError, match="was loaded and no weight of its layers was seen"):
            load(qwen3, tier)
        return
    loaded = load(qwen3, tier)
    assert loaded.backing is None
    assert "they take their memory twice" in loaded.notes[0]


@pytest.mark.usefixtures("cache")
def test_the_first_start_writes_a_store_and_the_second_reads_no_weights(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = store_path(str(qwen3), "float32", "native")
    first = load(qwen3, "disk")
    assert first.notes == (f"Wrote the layers of {qwen3} to {file}.",)
    with monkeypatch.context() as patch:
        patch.setattr("finetune.model.store.load_published", None)
        patch.setattr("finetune.model.store._hash", None)
        second = load(qwen3, "disk")
    assert second.notes == ()
    assert_same_model(second.model, first.model)


def change_a_weight(shard: Path) -> None:
    """Change one bit of a shard, and set its times to what they were."""
    status, content = shard.stat(), bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    now = shard.stat()
    assert (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns)


@pytest.mark.usefixtures("cache")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "is_replaced"),
    mostly_slow(
        {
            f"{shard}-{how}": (number, is_replaced)
            for shard, number in (("first shard", 0), ("last shard", -1))
            for how, is_replaced in (("in place", False), ("by another file", True))
        },
        "first shard-by another file",
        "last shard-in place",
    ),
)
def test_a_shard_that_changes_under_its_old_size_and_time_is_not_trained_on(
    number: int, is_replaced: bool, qwen3: Path
) -> None:
    load(qwen3, "disk")
    shard = sorted(qwen3.glob("*.safetensors"))[number]
    if is_replaced:
        other = shard.with_name("other")
        shutil.copy2(shard, other)
        change_a_weight(other)
        other.replace(shard)
    else:
        change_a_weight(shard)
    loaded = load(qwen3, "disk")
    (note,) = loaded.notes
    assert "Built the store anew" in note
    assert "it was made from other contents" in note
    assert_same_model(loaded.model, load(qwen3, "ram").model)
    assert load(qwen3, "disk").notes == ()


@pytest.mark.usefixtures("cache")
def test_a_touched_shard_is_read_again_and_the_store_is_trusted_from_then_on(qwen3: Path) -> None:
    file = store_path(str(qwen3), "float32", "native")
    load(qwen3, "disk")
    written = file.stat().st_mtime_ns
    (qwen3 / "config.json").touch()
    assert load(qwen3, "disk").notes == (
        f"Files of {qwen3} were touched, so all were read again: they hold what {file} holds.",
    )
    assert load(qwen3, "disk").notes == ()
    assert file.stat().st_mtime_ns == written, "the store was not written again"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("damage", ["", "{}", "[1]", "null", '{"stamps": 1, "contents": {}}'])
def test_a_damaged_record_is_no_reason_to_trust_a_store(damage: str, qwen3: Path) -> None:
    file = store_path(str(qwen3), "float32", "native")
    load(qwen3, "disk")
    record = file.with_name(file.name + ".source")
    whole = record.read_text()
    record.write_text(damage)
    (note,) = load(qwen3, "disk").notes
    assert "were read again" in note
    assert record.read_text() == whole


@pytest.mark.usefixtures("cache")
def test_weights_that_change_while_a_store_is_written_leave_none(
    qwen3: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = sorted(qwen3.glob("*.safetensors"))[0]

    def load_and_change(*words: Any) -> PreTrainedModel:
        model = load_published(*words)
        change_a_weight(shard)
        return model

    monkeypatch.setattr("finetune.model.store.load_published", load_and_change)
    with pytest.raises(ModelError, match=rf"{re.escape(str(shard))} changed while it was read"):
        load(qwen3, "disk")
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def damage_size(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def damage_header(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-4096].ljust(len(content), b"x"))


@pytest.mark.usefixtures("cache")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("damage", "why"), [(damage_size, "it has"), (damage_header, "its header is damaged")]
)
def test_a_damaged_store_is_built_anew_and_said_so(
    damage: Callable[[Path], None], why: str, qwen3: Path
) -> None:
    file = store_path(str(qwen3), "float32", "native")
    expected = load(qwen3, "ram").model
    load(qwen3, "disk")
    damage(file)
    (note,) = load(qwen3, "disk").notes
    assert note.startswith(f"Built the store anew: the store {file} cannot be used: {why}")
    again = load(qwen3, "disk")
    assert again.notes == ()
    assert_same_model(again.model, expected)


@pytest.mark.usefixtures("cache")
@pytest.mark.thorough
def test_a_layer_damaged_on_disk_stops_the_run_and_the_next_start_builds_it_anew(
    qwen3: Path,
) -> None:
    file = store_path(str(qwen3), "float32", "native")
    load(qwen3, "disk")
    content = bytearray(file.read_bytes())
    content[8192] ^= 64
    file.write_bytes(content)
    loaded = load(qwen3, "disk")
    loaded.model.requires_grad_(False)
    with pytest.raises(TransferError, match=r"layer 0 in .* is not what was written there"):
        offload.attach(loaded.model, num_slots=2, device="cpu", backing=loaded.backing)
    assert load(qwen3, "disk").notes == (f"Wrote the layers of {qwen3} to {file}.",)


@pytest.mark.usefixtures("cache")
def test_weights_that_have_changed_get_a_new_store(qwen3: Path) -> None:
    load(qwen3, "disk")
    publish(MODELS["qwen3"](), qwen3, seed=1)
    changed = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    loaded = load(qwen3, "disk")
    (note,) = loaded.notes
    assert "it was made from other contents" in note
    assert_same_model(loaded.model, changed)


@pytest.mark.usefixtures("cache")
def test_models_dtypes_codecs_and_places_have_stores_of_their_own(
    qwen3: Path, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere" / "qwen3"
    shutil.copytree(qwen3, other)
    places: list[tuple[str, str, str]] = [
        (str(qwen3), "float32", "native"),
        (str(qwen3), "bfloat16", "native"),
        (str(other), "float32", "native"),
        (str(qwen3), "float32", "nf4"),
    ]
    assert len({store_path(*place) for place in places}) == 4
    name = store_path("Qwen/Qwen3-0.6B", "float32", "nf4").name
    assert name.startswith("Qwen3-0.6B-float32-nf4-")


LOAD = """
import sys
import torch
import offload.engine.model.capture, offload.engine.host.store
torch.set_num_threads(1)
from finetune.env import quiet_libraries
quiet_libraries()
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM, AutoModelForCausalLM
from tests.checkpoints import loaded
path, tier, dtype = sys.argv[1:4]
print("ready", flush=True)
sys.stdin.readline()
print("loaded", *loaded(path, tier, dtype).notes, flush=True)
sys.stdin.readline()
"""


class Child:
    """Another process that loads a model when it is told to."""

    def __init__(self, path: Path, tier: Tier, dtype: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOAD, str(path), tier, dtype],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def own_bytes(self) -> int:
        """Memory that no file stands behind; mapped files do not count."""
        fields = dict(
            line.split(":\t")
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            if line.startswith("Rss")
        )
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


@pytest.fixture
def start(cache: Path) -> Iterator[Callable[[Path, Tier, str], Child]]:
    children: list[Child] = []

    def start(path: Path, tier: Tier, dtype: str) -> Child:
        children.append(Child(path, tier, dtype))
        return children[-1]

    yield start
    for child in children:
        child.process.kill()
        child.process.communicate()


@pytest.mark.usefixtures("cache")
@pytest.mark.slow
def test_two_processes_that_want_a_store_build_one(
    qwen3: Path, cache: Path, start: Callable[[Path, Tier, str], Child]
) -> None:
    children = [start(qwen3, "disk", "float32") for _ in range(2)]
    for child in children:
        child.go()
    file = store_path(str(qwen3), "float32", "native")
    told = sorted(child.read() for child in children)
    assert told == ["loaded", f"loaded Wrote the layers of {qwen3} to {file}."]
    assert sorted(entry.name for entry in cache.iterdir()) == [
        file.name,
        file.name + ".lock",
        file.name + ".source",
    ]
    assert_same_model(load(qwen3, "disk").model, load(qwen3, "ram").model)


@pytest.mark.usefixtures("cache")
def test_a_builder_that_is_killed_leaves_the_next_start_free(
    qwen3: Path, cache: Path, start: Callable[[Path, Tier, str], Child]
) -> None:
    file = store_path(str(qwen3), "float32", "native")
    cache.mkdir(parents=True)
    file.with_name(file.name + ".partial").write_bytes(b"torn")
    assert load(qwen3, "disk").notes == (f"Wrote the layers of {qwen3} to {file}.",)
    assert sorted(entry.name for entry in cache.iterdir()) == [
        file.name,
        file.name + ".lock",
        file.name + ".source",
    ]


# ----------------------------------------------------------------------------------------- the peak

LARGE: dict[str, Any] = LOADING_SHAPE | {
    "hidden_size": 1024,
    "head_dim": 256,
    "num_hidden_layers": 10,
}


def large(name: str) -> PreTrainedModel:
    """About 240 MB in bfloat16, per-expert tensors where it has experts."""
    config = LARGE | {"intermediate_size": 3072, "dtype": torch.bfloat16}
    if name == "dense":
        return AutoModelForCausalLM.from_config(Qwen3Config(**config))
    config |= {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**config))


@pytest.fixture(scope="module", params=["dense", "experts"])
def published(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # on a disk: what is in memory would count
        large(request.param).save_pretrained(folder, max_shard_size="50MB")
        yield Path(folder)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("tier", "dtype"),
    [
        pytest.param("ram", "bfloat16", marks=pytest.mark.slow),
        pytest.param("disk", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("ram", "float32", marks=pytest.mark.exhaustive),
        pytest.param("disk", "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_loading_takes_at_most_three_layers_over_the_slab(
    tier: Tier, dtype: str, published: Path, start: Callable[[Path, Tier, str], Child]
) -> None:
    child = start(published, tier, dtype)
    begin_bytes = peak_bytes = child.own_bytes()
    child.go()
    stream = child.process.stdout
    assert stream is not None
    os.set_blocking(stream.fileno(), False)
    while not (said := child.read()):
        assert child.process.poll() is None
        peak_bytes = max(peak_bytes, child.own_bytes())
        time.sleep(0.0005)
    assert said.startswith("loaded")
    config = Qwen3Config.from_pretrained(published)
    weight_bytes = sum(shard.stat().st_size for shard in published.glob("*.safetensors"))
    layers_bytes = weight_bytes * (2 if dtype == "float32" else 1)  # with a tiny vocabulary
    slab_bytes = layers_bytes if tier == "ram" else 0
    over_bytes = peak_bytes - begin_bytes - slab_bytes
    assert over_bytes <= 3 * layers_bytes / config.num_hidden_layers, over_bytes / MIB


@pytest.mark.usefixtures("cache")
@pytest.mark.slow
def test_the_second_start_from_a_store_takes_no_memory_for_layers(
    published: Path, start: Callable[[Path, Tier, str], Child]
) -> None:
    load(published, "disk", dtype="bfloat16")
    child = start(published, "disk", "bfloat16")
    begin_bytes = child.own_bytes()
    child.go()
    assert child.read() == "loaded"
    config = Qwen3Config.from_pretrained(published)
    weight_bytes = sum(shard.stat().st_size for shard in published.glob("*.safetensors"))
    assert child.own_bytes() - begin_bytes < weight_bytes / config.num_hidden_layers


# ------------------------------------------------------------------------------------- completeness


Tensors = dict[str, torch.Tensor]

COMPLETENESS_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "vocab_size": 64,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


@pytest.fixture
def cache_completeness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def add_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change what the one shard holds."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def add_layer(tensors: Tensors, *, number: int) -> None:
    """Add a layer behind the last one, as the last is, with what such a layer has besides."""
    last = {name: t for name, t in tensors.items() if ".layers.2." in name}
    tensors |= {name.replace(".2.", f".{number}.", 1): t.clone() for name, t in last.items()}
    tensors[f"model.layers.{number}.eh_proj.weight"] = torch.ones(32, 64)
    tensors[f"model.layers.{number}.shared_head.norm.weight"] = torch.ones(32)


@pytest.mark.usefixtures("cache_completeness")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "is_quantised", "tier"),
    diagonal(["deepseek_v3", "glm4_moe"], [False, True], ["ram", "disk"]),
)
def test_layers_that_predict_further_tokens_are_left_out(
    kind: str, is_quantised: bool, tier: Tier, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(kind, **COMPLETENESS_SHAPE, num_nextn_predict_layers=1)
    pack: Pack = pack_fp8(rows=16, columns=16) if is_quantised else lambda name, t: {name: t}
    quantization = FP8 if is_quantised else None
    for folder in ("with", "without"):
        write_checkpoint(tmp_path / folder, config, pack=pack, quantization=quantization)
    add_tensors(tmp_path / "with", lambda t: add_layer(t, number=3))
    found, expected = (
        load_model_of(tmp_path / "with", tier),
        load_model_of(tmp_path / "without", tier),
    )
    found.name_or_path = found.config.name_or_path = expected.name_or_path
    assert_same_model(found, expected)


@pytest.mark.usefixtures("cache_completeness")
@pytest.mark.thorough
@pytest.mark.parametrize(("number", "num_further"), [(3, 0), (4, 1)])
def test_other_layers_that_the_config_does_not_know_are_named(
    number: int, num_further: int, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(
        "glm4_moe", **COMPLETENESS_SHAPE, num_nextn_predict_layers=num_further
    )
    write_checkpoint(tmp_path, config)
    add_tensors(tmp_path, lambda t: add_layer(t, number=number))
    with pytest.raises(ModelError, match=rf"unknown to the model, \d+ .*layers\.{number}\."):
        load_model_of(tmp_path, "ram")


@pytest.mark.usefixtures("cache_completeness")
@pytest.mark.thorough
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_what_older_checkpoints_hold_besides_weights_is_let_be(tier: Tier, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, AutoConfig.for_model("llama", **COMPLETENESS_SHAPE))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    add_tensors(
        tmp_path,
        lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    assert_same_model(load_model_of(tmp_path, tier), expected)


@pytest.mark.usefixtures("cache_completeness")
@pytest.mark.thorough
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_head_that_is_tied_and_published_all_the_same_is_one_tensor(
    tier: Tier, tmp_path: Path
) -> None:
    write_checkpoint(
        tmp_path, AutoConfig.for_model("llama", **COMPLETENESS_SHAPE, tie_word_embeddings=True)
    )
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    embedding = expected.model.embed_tokens.weight.detach()
    add_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    found = load_model_of(tmp_path, tier)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert_same_model(found, expected)


def rename(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def drop(tensors: Tensors, part: str, *, of: str = "") -> None:
    for name in [name for name in tensors if part in name and of in name]:
        del tensors[name]


@pytest.mark.usefixtures("cache_completeness")
@pytest.mark.parametrize("is_quantised", mostly_slow([False, True], True))
@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        (lambda t: drop(t, "layers.1.mlp.experts.2.up_proj"), "2.up_proj"),
        (lambda t: drop(t, "layers.1.mlp.experts.3.up_proj"), "3.up_proj"),
        (lambda t: rename(t, "layers.1.mlp.experts.2.", "layers.1.mlp.experts.4."), "2.down_proj"),
        (lambda t: rename(t, "layers.1.mlp.experts.0.", "layers.1.mlp.experts.7."), "0.down_proj"),
    ],
)
def test_one_expert_that_is_missing_is_named(
    change: Callable[[Tensors], object], lacking: str, is_quantised: bool, tmp_path: Path
) -> None:
    """With the names changed transformers would stack as many experts as the config says."""
    pack: Pack = pack_fp8(rows=16, columns=16) if is_quantised else lambda name, t: {name: t}
    config = AutoConfig.for_model("glm4_moe", **COMPLETENESS_SHAPE)
    write_checkpoint(tmp_path, config, pack=pack, quantization=FP8 if is_quantised else None)
    add_tensors(tmp_path, change)
    with pytest.raises(ModelError, match=rf"lacks \d tensors, such as .*\.experts\.{lacking}"):
        load_model_of(tmp_path, "ram")


@pytest.mark.usefixtures("cache_completeness")
def test_a_projection_that_all_experts_lack_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, AutoConfig.for_model("glm4_moe", **COMPLETENESS_SHAPE))
    add_tensors(
        tmp_path,
        lambda t: drop(t, ".gate_proj.weight", of=".layers.1.mlp.experts."),
    )
    with pytest.raises(ModelError, match=r"lacks 4 tensors, such as .*experts\.0\.gate_proj"):
        load_model_of(tmp_path, "ram")


@pytest.mark.usefixtures("cache_completeness")
def test_the_last_experts_that_are_missing_are_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, AutoConfig.for_model("glm4_moe", **COMPLETENESS_SHAPE))
    add_tensors(tmp_path, lambda t: drop(t, ".layers.1.mlp.experts.3."))
    with pytest.raises(
        ModelError, match=r"in other sizes .* 2 tensors, .*layers\.1\..*\.down_proj"
    ):
        load_model_of(tmp_path, "ram")


@pytest.mark.usefixtures("cache_completeness")
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_shard_that_the_index_names_and_is_not_there_is_named(tier: Tier, tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path, AutoConfig.for_model("llama", **COMPLETENESS_SHAPE), shard_bytes=20_000
    )
    name = sorted(file.name for file in tmp_path.glob("*.safetensors"))[1]
    (tmp_path / name).unlink()
    with pytest.raises(ModelError, match=rf"has no {name}; a model holds"):
        load_model_of(tmp_path, tier)


# ----------------------------------------------------------------------------------------- overflow


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * x, None


def model() -> nn.Module:
    return nn.ModuleDict({"first": Twice(), "inner": nn.ModuleDict({"second": Twice()})})


def run(found: nn.Module, largest: float) -> None:
    x = torch.full((3,), largest, dtype=torch.float16)
    for module in (found["first"], found["inner"]["second"]):  # type: ignore[index]
        x, _ = module(x)


def test_the_first_module_that_overflows_is_named() -> None:
    for largest, expected in ((60000.0, ["first"]), (30000.0, ["inner.second"]), (1.0, [])):
        made = model()
        with first_overflow(made) as found:
            run(made, largest)
        assert found == expected
        run(made, 60000.0)
        assert found == expected  # the hook is gone


def test_other_models_are_not_looked_at() -> None:
    with first_overflow(model()) as found:
        run(model(), 60000.0)
    assert found == []


def test_a_module_that_was_given_what_is_not_finite_is_left_out() -> None:
    made = model()
    with first_overflow(made) as found:
        run(made, float("nan"))
        assert found == []
        run(made, 30000.0)
    assert found == ["inner.second"]


# ------------------------------------------------------------------------------------- fuse experts


JOINED = ("mixtral", "deepseek_v3", "glm4_moe", "phimoe")
NOT_JOINED = ("gpt_oss", "granitemoe", "llama")


@pytest.fixture
def cache_fuse_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache_fuse_experts")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "tier", "dtype"),
    mostly_slow(
        [
            (name, *how)
            for name in ("mixtral", "qwen3_next", "granitemoe")
            for how in (("ram", "bfloat16"), ("disk", "float32"))
        ],
        ("mixtral", "ram", "bfloat16"),
        ("granitemoe", "disk", "float32"),
    ),
)
def test_move_a_published_mixture_is_loaded_as_transformers_loads_it(
    name: str, tier: Literal["ram", "disk"], dtype: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, tiny_config(name), shard_bytes=40_000)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    assert_same_model(load_model_of(tmp_path, tier, dtype), expected)


@pytest.mark.usefixtures("cache_fuse_experts")
@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow([*JOINED, *NOT_JOINED], "mixtral", "gpt_oss", "llama"))
def test_experts_are_joined_before_transformers_sees_them(name: str, tmp_path: Path) -> None:
    config = tiny_config(name)
    write_checkpoint(tmp_path, config)
    model = AutoModelForCausalLM.from_config(config)
    published = open_tensors([str(file) for file in tmp_path.glob("*.safetensors")])
    joined = join_experts(published, model, str(tmp_path))
    assert published.keys() == published_shapes(config).keys()
    state = model.state_dict()
    made = joined.keys() - published.keys()
    if name not in JOINED:
        assert joined == published
        return
    assert {key.rpartition(".")[2] for key in made} == {"gate_up_proj", "down_proj"}
    assert all(joined[key][...].shape == state[key].shape for key in made)
    assert not any(".experts.0." in key for key in joined)


@pytest.mark.usefixtures("cache_fuse_experts")
def test_a_tensor_that_is_read_may_be_written_to(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("llama"))
    model = load_model_of(tmp_path, "ram", "bfloat16")
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(1)


@pytest.mark.usefixtures("cache_fuse_experts")
@pytest.mark.parametrize("num_lost", [1, 5000])
def test_a_file_that_is_cut_off_is_told(num_lost: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config("llama"))
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-num_lost])
    with pytest.raises(ModelError, match=r"safetensors is cut off or damaged"):
        open_tensors([str(file)])


@pytest.mark.usefixtures("cache_fuse_experts")
@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"[]"])
def test_what_is_no_safetensors_file_is_told(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"model.safetensors is cut off or damaged"):
        open_tensors([str(file)])


@pytest.mark.usefixtures("cache_fuse_experts")
def test_tensors_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
    header += b'"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    values = torch.tensor([1.5, -2.0])
    content = len(header).to_bytes(8, "little") + header + b"xyz" + values.numpy().tobytes()
    (tmp_path / "x").write_bytes(content)
    tensors = open_tensors([str(tmp_path / "x")])
    assert torch.equal(tensors["b"][...], values)


@pytest.mark.usefixtures("cache_fuse_experts")
def test_an_expert_of_another_shape_than_the_first_is_named(tmp_path: Path) -> None:
    """Its rows would run over into the next expert's."""
    write_checkpoint(tmp_path, tiny_config("mixtral"))
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"unlike the first expert's, 1 tensors, such as {name}"):
        load_model_of(tmp_path, "ram", "bfloat16")


# --------------------------------------------------------------------------------------- dequantize


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DEQUANTIZE_FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [32, 16],
    "activation_scheme": "dynamic",
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}

DEQUANTIZE_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8},
}


@pytest.fixture
def cache_dequantize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **DEQUANTIZE_SHAPE | KINDS[kind] | changes)


def unpacked(pack: Pack, name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return what bitsandbytes makes of a tensor that it has packed."""
    parts = dict(pack(name, values))
    packed = parts.pop(name)
    if not parts:
        return {name: values}
    state = {key.removeprefix(name + "."): part for key, part in parts.items()}
    return {name: dequantize_4bit(packed, QuantState.from_dict(state, torch.device("cpu")))}


# ------------------------------------------------------------------------------------ bitsandbytes


@pytest.mark.usefixtures("cache_dequantize")
@pytest.mark.parametrize("tier", mostly_slow(["ram", "disk"], "disk"))
@pytest.mark.parametrize(
    ("kind", "quant_type", "has_double_quantisation", "storage", "dtype"),
    mostly_slow(
        [
            ("llama", "nf4", True, torch.uint8, "bfloat16"),
            ("qwen3_moe", "nf4", True, torch.uint8, "bfloat16"),
            ("qwen3_moe", "fp4", False, torch.bfloat16, "float32"),
            ("mixtral", "nf4", False, torch.uint8, "float32"),
        ],
        ("qwen3_moe", "nf4", True, torch.uint8, "bfloat16"),
        ("qwen3_moe", "fp4", False, torch.bfloat16, "float32"),
    ),
)
def test_4_bit_weights_are_those_that_bitsandbytes_dequantises(
    kind: str,
    quant_type: str,
    has_double_quantisation: bool,
    storage: torch.dtype,
    dtype: str,
    tier: Tier,
    tmp_path: Path,
) -> None:
    pack = pack_bnb_4bit(
        quant_type=quant_type, has_double_quantisation=has_double_quantisation, storage=storage
    )
    write_checkpoint(
        tmp_path / "packed", config_of(kind), pack=pack, quantization=BNB, shard_bytes=50_000
    )
    write_checkpoint(tmp_path / "plain", config_of(kind), pack=partial(unpacked, pack))
    found = load_model_of(tmp_path / "packed", tier=tier, dtype=dtype)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=getattr(torch, dtype))
    expected.name_or_path = expected.config.name_or_path = found.name_or_path
    assert_same_model(found, expected)
    assert all(type(m) is nn.Linear for m in found.modules() if isinstance(m, nn.Linear))
    assert not hasattr(found.config, "quantization_config")


def by_definition(pack: Pack, name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return what the format says of a packed tensor: flat blocks of 64, each with its scale."""
    parts = dict(pack(name, values))
    packed = parts.pop(name)
    if not parts:
        return {name: values}
    state = QuantState.from_dict(
        {key.removeprefix(name + "."): part for key, part in parts.items()}, torch.device("cpu")
    )
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
    nibbles = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1).view(-1)
    found = state.code[nibbles[: values.numel()].long()]
    found *= scales.repeat_interleave(64)[: values.numel()]
    return {name: found.to(values.dtype).view(values.shape)}


@pytest.mark.usefixtures("cache_dequantize")
@pytest.mark.thorough
@pytest.mark.parametrize("has_double_quantisation", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4_bit_rows_that_are_no_whole_blocks_are_dequantised_as_the_format_says(
    quant_type: str, has_double_quantisation: bool, tmp_path: Path
) -> None:
    """On a CPU bitsandbytes 0.50 itself does not, for rows of 48 or 96 weights."""
    pack = pack_bnb_4bit(quant_type=quant_type, has_double_quantisation=has_double_quantisation)
    config = config_of("llama", hidden_size=48, intermediate_size=96)
    write_checkpoint(tmp_path / "packed", config, pack=pack, quantization=BNB)
    write_checkpoint(tmp_path / "plain", config, pack=partial(by_definition, pack))
    found, expected = load_model_of(tmp_path / "packed"), load_model_of(tmp_path / "plain")
    for name, weight in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), weight), name


@pytest.mark.usefixtures("cache_dequantize")
def test_only_one_tensor_is_dequantised_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every parameter is taken out of the loader's hands before the next one is read."""
    pack = pack_bnb_4bit(quant_type="nf4", has_double_quantisation=True)
    write_checkpoint(tmp_path, config_of("llama"), pack=pack, quantization=BNB)
    order: list[str] = []

    def note(*_arguments: Any, told: str, then: Any, **_keywords: Any) -> Any:
        order.append(told)
        return then(*_arguments, **_keywords)

    catch = CaptureWeights._catch

    def caught(self: Any, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and parameter.ndim == 2:
            order.append("put")
        catch(self, module, name, parameter)

    import bitsandbytes.functional as functional

    monkeypatch.setattr(CaptureWeights, "_catch", caught)
    monkeypatch.setattr(
        functional, "dequantize_4bit", partial(note, told="read", then=dequantize_4bit)
    )
    load_model_of(tmp_path)
    in_layers = order[order.index("read") :]
    assert in_layers[:28] == ["read", "put"] * 14


# ------------------------------------------------------------------------------------- mxfp4, fp8


@pytest.mark.usefixtures("cache_dequantize")
@pytest.mark.parametrize(("dtype", "tier"), diagonal(["bfloat16", "float32"], ["ram", "disk"]))
def test_mxfp4_experts_are_those_that_transformers_dequantises(
    dtype: str, tier: Tier, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, config_of("gpt_oss"), pack=pack_mxfp4, quantization=MXFP4)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=getattr(torch, dtype), quantization_config=Mxfp4Config(dequantize=True)
    )
    for parameter in expected.parameters():  # which 5.17 leaves in bfloat16
        parameter.data = parameter.data.to(getattr(torch, dtype))
    found = load_model_of(tmp_path, tier=tier, dtype=dtype)
    assert_same_model(found, expected)
    assert found.model.layers[1].mlp.experts.down_proj.abs().max() > 0.05
    assert not hasattr(found.config, "quantization_config")


@pytest.mark.usefixtures("cache_dequantize")
@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_fp8_weights_are_those_that_transformers_dequantises(
    kind: str, tier: Tier, tmp_path: Path
) -> None:
    pack = pack_fp8(rows=32, columns=16)
    write_checkpoint(tmp_path, config_of(kind), pack=pack, quantization=DEQUANTIZE_FP8)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(weight_block_size=(32, 16), dequantize=True),
    )
    assert_same_model(load_model_of(tmp_path, tier=tier), expected)


@pytest.mark.usefixtures("cache_dequantize")
def test_fp8_rows_that_are_no_whole_blocks_are_near_what_was_packed(tmp_path: Path) -> None:
    config = config_of("llama", hidden_size=40, intermediate_size=72)
    quantization = DEQUANTIZE_FP8 | {"weight_block_size": [32, 32]}
    write_checkpoint(
        tmp_path / "packed", config, pack=pack_fp8(rows=32, columns=32), quantization=quantization
    )
    write_checkpoint(tmp_path / "plain", config)
    found, expected = load_model_of(tmp_path / "packed"), load_model_of(tmp_path / "plain")
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(
            found.get_parameter(name), weight, rtol=2**-4 + 2**-8, atol=1e-4, msg=name
        )


# ------------------------------------------------------------------------------------------ errors


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.usefixtures("cache_dequantize")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("bnb", lambda t: t.pop(GATE), rf"{GATE} lacks {GATE}"),
        ("bnb", lambda t: t.pop(f"{GATE}.absmax"), rf"{GATE} lacks {GATE}\.absmax"),
        ("bnb", lambda t: t.pop(f"{GATE}.quant_map"), rf"{GATE} lacks {GATE}\.quant_map"),
        ("bnb", lambda t: t.pop(f"{GATE}.nested_absmax"), rf"lacks {GATE}\.nested_absmax"),
        ("bnb", lambda t: t.pop(f"{GATE}.nested_quant_map"), rf"lacks {GATE}\.nested_quant_map"),
        (
            "bnb",
            lambda t: t.pop(f"{GATE}.quant_state.bitsandbytes__nf4"),
            rf"{GATE}\S* \(torch.uint8\) lacks the scales",
        ),
        ("bnb", lambda t: t.pop("model.norm.weight"), r"lacks 1 tensors, such as model\.norm"),
        ("bnb", lambda t: t.update(x=torch.ones(2)), "unknown to the model, 1 tensors, such as x"),
        (
            "fp8",
            lambda t: t.pop(f"{GATE}_scale_inv"),
            rf"{GATE} \(torch.float8_e4m3fn\) lacks the scales",
        ),
        ("fp8", lambda t: t.pop(GATE), rf"{GATE} lacks {GATE}"),
    ],
)
def test_a_missing_part_is_named(
    form: str, change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    packs: dict[str, tuple[Pack, dict[str, Any]]] = {
        "bnb": (pack_bnb_4bit(quant_type="nf4", has_double_quantisation=True), BNB),
        "fp8": (pack_fp8(rows=32, columns=16), DEQUANTIZE_FP8),
    }
    pack, quantization = packs[form]
    write_checkpoint(tmp_path, config_of("llama"), pack=pack, quantization=quantization)
    change_tensors(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load_model_of(tmp_path)


@pytest.mark.usefixtures("cache_dequantize")
@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            "bitsandbytes with load_in_8bit: True",
        ),
        ({"load_in_8bit": True}, "bitsandbytes with load_in_8bit: True"),
        ({"quant_method": "hqq", "bits": 4}, "hqq"),
        ({"quant_method": "awq", "bits": 4}, "awq with version: missing"),
        ({"quant_method": "fp8"}, "fp8 with weight_block_size: missing"),
    ],
)
def test_other_quantised_weights_are_refused_by_name(
    quantization: dict[str, Any], name: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, config_of("llama"), quantization=quantization)
    with pytest.raises(ModelError, match=rf"is quantised, its quant_method is {name};"):
        load_model_of(tmp_path)


@pytest.mark.usefixtures("cache_dequantize")
def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    pack = pack_bnb_4bit(quant_type="nf4", has_double_quantisation=True)
    write_checkpoint(tmp_path, config_of("llama"), pack=pack, quantization=BNB, shard_bytes=50_000)
    shutil.move(tmp_path / "model-00002-of-00004.safetensors", tmp_path / "elsewhere")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    with pytest.raises(ModelError, match=r"has no model-00002-of-00004"):
        load_model_of(tmp_path)
