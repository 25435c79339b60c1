"""What the images of rows cost, in words: before step 1, on disk, and in each step."""

from typing import Any

from finetune.report.format import shown_gib, shown_time
from offload.plan.images import ImagePass, image_pass
from offload.plan.memory.memory import IMAGES
from offload.plan.plan import Plan

_FEW_TOKENS = 256


def pass_of(plan: Plan) -> ImagePass:
    """Return the pass over the images of a planned run, whose rows have some.

    Raises:
        DoesNotFitError: The tower and one image do not fit on the device.
    """
    request = plan.request
    assert request.images is not None, "of rows with images"
    return image_pass(
        plan.facts,
        plan.machine,
        request.images,
        dtype_bytes=request.typical.dtype_bytes,
        limit_bytes=request.vram_budget_bytes,
    )


def images_json(plan: Plan) -> dict[str, Any]:
    """Return the figures of a pass for programs; sizes in bytes, times in seconds."""
    cost = pass_of(plan)
    images, disk = cost.images, plan.machine.disk_bytes_per_s
    step_bytes = plan.tokens_per_step * cost.token_bytes
    return {
        "num_images": images.num_images,
        "most_tokens": images.most_tokens,
        "num_tokens": images.total_tokens,
        "token_bytes": cost.token_bytes,
        "feature_bytes": cost.feature_bytes,
        "pass_s": cost.pass_s,
        "host_s": cost.host_s,
        "compute_s": cost.compute_s,
        "load_s": cost.load_s,
        "disk_s": cost.disk_s,
        "peak_vram_bytes": cost.peak_bytes,
        "device_memory": {term.name: term.num_bytes for term in cost.device_memory},
        "step_vram_bytes": sum(x.num_bytes for x in plan.device_memory if x.name == IMAGES),
        "step_bytes": step_bytes,
        "step_disk_s": None if disk is None else step_bytes / disk.value,
    }


def images_line(cost: ImagePass, *, folder: str = "") -> str:
    """Return how many images there are, and what their features take.

    Args:
        cost: Cost of the pass over the images.
        folder: Folder of the features, if that is known.
    """
    images, total = cost.images, cost.images.total_tokens
    if total is None or cost.feature_bytes is None or cost.pass_s is None:
        one = shown_gib(images.most_tokens * cost.token_bytes)
        most = f"at most {images.most_tokens:,} tokens"
        return f"{most}, {one} on disk each; `--images 10000` says it of all"
    mean = round(total / images.num_images) if images.num_images else 0
    most = "at most " if images.num_tokens is None else ""
    place = f"of features in {folder}" if folder else "on disk"
    return (
        f"{images.num_images:,} of {most}{mean:,} tokens: {shown_gib(cost.feature_bytes)} {place},"
        f" {shown_time(cost.pass_s)} before step 1"
    )


def shrunk_line(cost: ImagePass) -> str:
    """Return what would make features smaller; nothing for images of few tokens.

    Some processors make the same few tokens of every image, and have no setting for fewer.
    """
    half = cost.images.most_tokens // 2
    return f"(`image.max_tokens: {half}` halves it)" if half >= _FEW_TOKENS else ""


def images_section(
    *, num_images: int, num_tokens: int, max_tokens: int | None, processor: str
) -> str:
    """Return what a model card says of the images that a run has trained on.

    Args:
        num_images: Distinct images of the training rows.
        num_tokens: Tokens of all of them.
        max_tokens: Tokens of an image at most, by the recipe; None for the processor's own limit.
        processor: The class of the model's processor, and its own limit.
    """
    most = "as many as the processor makes of it (`image.max_tokens` is not set)"
    if max_tokens is not None:
        most = f"at most {max_tokens:,} (`image.max_tokens`)"
    mean = round(num_tokens / num_images)
    return (
        f"{num_images:,} distinct images, {mean:,} tokens in the mean; of each, {most}. They were"
        f" prepared by the base's own processor ({processor}). Its image tower was frozen: its"
        " weights are those of the base."
    )
