"""Made-up checkpoints of any size, with names and shards as published, one shard in memory.

The model is built without memory, and transformers' own conversion, run backwards on shapes alone,
tells what its published tensors are called (one per expert where those are published apart).

Values are cut from one block of random numbers, at another place for each tensor: made as fast as
they are written. Weights are about N(0, 0.02), as trained ones, and norms about 1.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from finetune.model.load import Loaded, load_model
from finetune.recipe.sections import ModelSection

POOL_LEN = 2**22 + 3
STRIDE = 1_000_003

Tier = Literal["ram", "disk"]
Pack = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""Given a tensor's name and values, returns what is published in its place."""


def write_checkpoint(
    folder: Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 256 * 2**20,
    is_fused: bool = False,
    pack: Pack = lambda name, values: {name: values},
    quantization: Mapping[str, Any] | None = None,
) -> int:
    """Write a model's config and random weights.

    Args:
        folder: Made if need be.
        config: Of a causal language model.
        dtype: Of the weights.
        shard_bytes: Most that a file holds, but for a larger tensor.
        is_fused: Keep transformers' own names, experts in one tensor.
        pack: How tensors are written down, such as in 4 bits.
        quantization: What `config.json` says of it.

    Returns:
        Bytes of the weights before packing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes = published_shapes(config, is_fused=is_fused)
    sizes = [shape.numel() * dtype.itemsize for shape in shapes.values()]
    shards = list(_shards(dict(zip(shapes, sizes, strict=True)), shard_bytes))
    weight_map: dict[str, str] = {}
    values = random_values(shapes, dtype)
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {key: t for name in names for key, t in pack(name, values(name)).items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = [type(_empty(config)).__name__]
    config.dtype = dtype
    fields = json.loads(config.to_json_string())
    if quantization is not None:
        fields["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    GenerationConfig().save_pretrained(folder)
    return sum(sizes)


def published_shapes(config: PreTrainedConfig, *, is_fused: bool = False) -> dict[str, torch.Size]:
    """Return the names and shapes that a checkpoint of this model has."""
    model = _empty(config)
    state = model.state_dict()
    for name in model.all_tied_weights_keys:
        state.pop(name, None)
    if not is_fused:
        state = revert_weight_conversion(model, state)
    return {name: tensor.shape for name, tensor in sorted(state.items())}


def random_values(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype
) -> Callable[[str], torch.Tensor]:
    """Return what makes a tensor's values, always the same ones."""
    pool = torch.randn(POOL_LEN, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    starts = {name: number * STRIDE % POOL_LEN for number, name in enumerate(shapes)}

    def values(name: str) -> torch.Tensor:
        shape, start = shapes[name], starts[name]
        num_copies = -(-(start + shape.numel()) // POOL_LEN)
        drawn = pool.repeat(num_copies)[start : start + shape.numel()].view(shape).clone()
        return 1 + drawn if name.endswith("norm.weight") else drawn

    return values


def pack_bnb_4bit(
    *, quant_type: str, has_double_quantisation: bool, storage: torch.dtype = torch.uint8
) -> Pack:
    """Return what packs every matrix but embeddings and head, as bitsandbytes saves it."""

    def pack(name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        from bitsandbytes.functional import quantize_4bit

        if not is_linear(name, values):
            return {name: values}
        packed, state = quantize_4bit(
            values,
            quant_type=quant_type,
            compress_statistics=has_double_quantisation,
            quant_storage=storage,
        )
        parts = {f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()}
        return {name: packed} | parts

    return pack


def pack_mxfp4(name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Pack fused experts as gpt_oss is published: (experts, out, blocks, 16), and their scales."""
    if values.ndim != 3:
        return {name: values}
    num_experts, d_in, d_out = values.shape
    random = torch.Generator().manual_seed(d_out)
    shape = (num_experts, d_out, d_in // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=random)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def pack_fp8(*, rows: int, columns: int) -> Pack:
    """Return what packs every matrix but embeddings and head, with a scale per block."""

    def pack(name: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if not is_linear(name, values):
            return {name: values}
        height, width = values.shape
        blocks = torch.zeros(-(-height // rows) * rows, -(-width // columns) * columns)
        blocks[:height, :width] = values.float()
        blocks = blocks.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        packed = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:height, :width]
        return {name: packed.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    return pack


def is_linear(name: str, values: torch.Tensor) -> bool:
    """Tell whether a published tensor is a matrix of a layer."""
    return values.ndim == 2 and ".layers." in name


def load(path: Path, tier: Tier = "ram", dtype: Any = "bfloat16") -> Any:
    """Return the model that a checkpoint is loaded as, for a CPU and not encoded."""
    return loaded(path, tier, dtype).model


def loaded(path: Path, tier: Tier = "ram", dtype: Any = "float32", **changes: Any) -> Loaded:
    """Return a checkpoint's model and where its layers are, for a CPU and not encoded."""
    settings: dict[str, Any] = {"codec": "native", "seed": 0, "experts_implementation": "eager"}
    section = ModelSection(path=str(path), dtype=dtype)
    return load_model(section, device="cpu", tier=tier, **settings | changes)


def assert_same_model(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Check that two models have the same weights and the same say."""
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name
            assert ours[name].requires_grad == tensor.requires_grad
    ids = torch.arange(24).view(2, 12)
    for model in (found, expected):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    assert found.name_or_path == expected.name_or_path
    assert not found.training


def _empty(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    num_bytes = 0
    for name, size in sizes.items():
        if shard and num_bytes + size > shard_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(name)
        num_bytes += size
    yield shard
