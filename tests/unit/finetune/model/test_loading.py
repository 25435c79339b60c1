"""Published weights go layer by layer to where they wait: same model, never twice in memory."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
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

import offload
from finetune.errors import ModelError
from finetune.model.checkpoint import load_published
from finetune.model.load import Loaded
from finetune.model.store import store_path
from offload.engine.host.slab import Slab
from offload.errors import TransferError
from offload.plan.facts.codec import CodecName
from tests.checkpoints import assert_same_model
from tests.checkpoints import loaded as load
from tests.tiers import mostly_slow

ROOT = Path(__file__).parents[4]
MIB = 2**20
SHAPE: dict[str, Any] = {
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
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)),
    "gemma3_text": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=8)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=4, vocab_size=64)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    ),
    # its routers stay in float32 whatever dtype is asked for
    "ernie4_5_moe": lambda: Ernie4_5_MoeForCausalLM(
        Ernie4_5_MoeConfig(**SHAPE, moe_num_experts=4, moe_k=2, moe_intermediate_size=16)
    ),
}
Tier = Literal["ram", "disk"]


@pytest.fixture(autouse=True)
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


def test_a_checkpoint_that_is_published_in_another_dtype_is_loaded_alike(tmp_path: Path) -> None:
    path = publish(MODELS["qwen3_moe"]().bfloat16(), tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for tier in ("ram", "disk"):
        assert_same_model(load(path, tier).model, expected)


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


def test_a_shard_that_is_cut_off_is_a_named_error(qwen3: Path, cache: Path) -> None:
    shard = sorted(qwen3.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 100)
    for tier in ("ram", "disk"):
        with pytest.raises(ModelError, match=rf"{shard.name} is cut off or damaged"):
            load(qwen3, tier)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


# -------------------------------------------------------------------------------------------- store


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


def test_weights_that_have_changed_get_a_new_store(qwen3: Path) -> None:
    load(qwen3, "disk")
    publish(MODELS["qwen3"](), qwen3, seed=1)
    changed = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    loaded = load(qwen3, "disk")
    (note,) = loaded.notes
    assert "it was made from other contents" in note
    assert_same_model(loaded.model, changed)


def test_models_dtypes_codecs_and_places_have_stores_of_their_own(
    qwen3: Path, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere" / "qwen3"
    shutil.copytree(qwen3, other)
    places: list[tuple[str, str, CodecName]] = [
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
import offload.engine.model.hooks, offload.engine.host.store
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

LARGE: dict[str, Any] = SHAPE | {"hidden_size": 1024, "head_dim": 256, "num_hidden_layers": 10}


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
