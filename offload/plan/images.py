"""The pass over images before a run: its time, its memory, and the features that it leaves on disk.

Each distinct image passes the frozen tower once, alone and without gradients. Its features are
written to disk, and the tower leaves the device before the first step, so the pass and the steps
never need memory together. A tower that takes more than half of the device's memory waits on the
host, and its weights are copied for each image anew. One process decodes, computes and writes one
image after another: times add up.

A step then needs, of each micro-batch in the front, one row of features for each token. A model
that adds features after its first layers (deepstack) is passed as much again for each of them, and
keeps it until these layers' backward, as `offload.plan.memory` counts.
"""

from dataclasses import dataclass

from offload.errors import DoesNotFitError
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.images import Images
from offload.plan.facts.linears import FP32_BYTES
from offload.plan.facts.tower import TowerFacts
from offload.plan.machine.machine import GIB, Machine
from offload.plan.memory.memory import CONTEXT, CUBLAS, CUBLAS_BYTES, MemoryTerm, total_bytes

TOWER, ONE_IMAGE = "image tower", "activations of an image"
# A JPEG of a megapixel decoded, resized and cut into patches by Pillow and NumPy takes one core
# 29 ms; other hosts are assumed to take as long.
PIXEL_S = 30e-9
# The smallest image takes so long too: 1.4 ms in decoder and processor, and 4 to flush its file.
IMAGE_S = 5e-3
TOWER_FRAC = 0.5  # of the device's memory, which a tower may take; the rest is for an image
BLOCK_OPS = 16  # operations of a tower's layer, as of a plain transformer
# Values of its width that a patch has live at once where most are, while queries and keys are
# rotated: in fp32 their copies, what is rotated and its parts; in the dtype of the tower the
# residual, its norm, queries, keys and values. Traced for Qwen3-VL, within 10 %; towers of other
# families take less.
ROTATED, BESIDE_ROTATION = 9, 5
PIXEL_FRAMES, CHANNELS = 2, 3  # an image is given twice to a tower that takes videos too


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePass:
    """What the features of images cost."""

    images: Images  # the images
    device_memory: tuple[MemoryTerm, ...]  # terms of the peak in device memory
    token_bytes: int  # bytes on disk of each token's features
    feature_bytes: int | None  # bytes on disk of all; None before rows are known
    host_s: float | None  # seconds of decoding and resizing
    compute_s: float | None  # seconds of the tower
    load_s: float | None  # seconds of copying its weights: once, or for each image
    disk_s: float | None  # seconds of writing the features; None if the disk was not measured

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of device memory."""
        return total_bytes(self.device_memory)

    @property
    def pass_s(self) -> float | None:
        """Predicted seconds of the pass; None before rows are known."""
        if self.host_s is None or self.compute_s is None or self.load_s is None:
            return None
        return self.host_s + self.compute_s + self.load_s + (self.disk_s or 0.0)


def image_pass(
    facts: ModelFacts,
    machine: Machine,
    images: Images,
    *,
    dtype_bytes: int,
    limit_bytes: int | None = None,
) -> ImagePass:
    """Predict the pass over images.

    Args:
        facts: A model with an image tower.
        machine: What computes, and the disk that the features are written to.
        images: The distinct images.
        dtype_bytes: Bytes of a weight, and of a feature.
        limit_bytes: Device memory that may be used; None takes all of the machine's.

    Raises:
        DoesNotFitError: One image does not fit on the device with the tower, or a layer of it.
    """
    tower = facts.tower
    assert tower is not None, "images need a tower"
    limit = machine.vram_bytes if limit_bytes is None else min(limit_bytes, machine.vram_bytes)
    tower_bytes = tower.num_parameters * dtype_bytes
    is_cuda = machine.device == "cuda"
    is_streamed = is_cuda and tower_bytes > TOWER_FRAC * (limit - machine.context_bytes)
    terms = _device_terms(tower, machine, images, dtype_bytes=dtype_bytes, is_streamed=is_streamed)
    _require_fit(terms, machine, images, limit_bytes=limit)
    token_bytes = tower.features_per_token * facts.hidden_size * dtype_bytes
    num_tokens, disk = images.total_tokens, machine.disk_bytes_per_s
    if num_tokens is None or images.num_images is None:
        return ImagePass(
            images=images,
            device_memory=terms,
            token_bytes=token_bytes,
            feature_bytes=None,
            host_s=None,
            compute_s=None,
            load_s=None,
            disk_s=None,
        )
    num_bytes = num_tokens * token_bytes
    num_loads = images.num_images if is_streamed else int(is_cuda)
    return ImagePass(
        images=images,
        device_memory=terms,
        token_bytes=token_bytes,
        feature_bytes=num_bytes,
        host_s=IMAGE_S * images.num_images + PIXEL_S * tower.pixels(num_tokens),
        compute_s=_compute_s(tower, machine, images.num_images, num_tokens),
        load_s=num_loads * tower_bytes / machine.h2d_bytes_per_s.value,
        disk_s=None if disk is None else num_bytes / disk.value,
    )


def _compute_s(tower: TowerFacts, machine: Machine, num_images: int, num_tokens: int) -> float:
    """Return the seconds of the tower: of its products and attention, or of starting them."""
    if not num_images:
        return 0.0
    num_patches = num_tokens * tower.patches_per_token
    products = 2.0 * (tower.block_parameters * num_patches + tower.other_parameters * num_tokens)
    keys = num_patches / num_images  # each patch attends to all of its image
    attention = 4.0 * num_patches * keys * tower.width * tower.num_blocks
    flops_s = products / machine.gemm_flops_per_s.value
    flops_s += attention / machine.attention_flops_per_s.value
    return max(flops_s, num_images * tower.num_blocks * BLOCK_OPS * machine.launch_s.value)


def _device_terms(
    tower: TowerFacts, machine: Machine, images: Images, *, dtype_bytes: int, is_streamed: bool
) -> tuple[MemoryTerm, ...]:
    num_patches = images.most_tokens * tower.patches_per_token
    width = tower.width
    rotation = width * (BESIDE_ROTATION * dtype_bytes + ROTATED * FP32_BYTES)
    # of the weights of a layer 4 W^2 are of attention; the others are of the MLP's n matrices, of
    # whose n outputs all are live with the residual and its norm
    in_mlp = tower.block_parameters // tower.num_blocks // width - 4 * width
    mlp = (2 * width + in_mlp) * dtype_bytes
    pixels = CHANNELS * PIXEL_FRAMES * tower.patch_size**2 * FP32_BYTES
    there = tower.block_parameters // tower.num_blocks if is_streamed else tower.num_parameters
    sizes = {
        TOWER: there * dtype_bytes,
        ONE_IMAGE: num_patches * (max(rotation, mlp) + pixels),
        CUBLAS: CUBLAS_BYTES if machine.device == "cuda" else 0,
        CONTEXT: machine.context_bytes,
    }
    return tuple(MemoryTerm(name=name, num_bytes=size) for name, size in sizes.items() if size)


def _require_fit(
    terms: tuple[MemoryTerm, ...], machine: Machine, images: Images, *, limit_bytes: int
) -> None:
    """Check that the pass fits on the device.

    Raises:
        DoesNotFitError: It does not.
    """
    needed = total_bytes(terms)
    if needed <= limit_bytes:
        return
    (of_image,) = (term.num_bytes for term in terms if term.name == ONE_IMAGE)
    free = limit_bytes - (needed - of_image)
    fitting = max(0, free) * images.most_tokens // of_image
    raise DoesNotFitError(
        f"the image tower and one image of {images.most_tokens:,} tokens need"
        f" {needed / GIB:.2f} GiB of device memory",
        limit=f"{limit_bytes / GIB:.2f} GiB may be used on {machine.name}",
        hint=f"`image.max_tokens: {fitting}`" if fitting else "a card with more memory",
    )
