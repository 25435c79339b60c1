"""What the images of rows cost, in words: before step 1, on disk, and in each step."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from finetune.errors import CheckpointError
from finetune.files.atomic import JsonFile, write_atomically
from finetune.files.manifest import sealed_json
from finetune.report.format import shown_gib, shown_time
from finetune.report.rows import Drawn, Row
from finetune.run.run_files import IMAGE_FIGURES, Bytes, Count, Seconds, Step, read_sealed
from offload.plan.images import ImagePass, image_pass
from offload.plan.memory.memory import IMAGES
from offload.plan.plan import Plan

_FEW_TOKENS = 256


class ImageFigures(BaseModel):
    """What the pass over the distinct images of a run took, before its first step."""

    model_config = ConfigDict(frozen=True)

    num_images: Step  # all of the run's rows
    num_tokens: Step  # tokens of all
    feature_bytes: Bytes  # size of their features on disk
    predicted_bytes: Bytes  # the same, predicted
    num_encoded: Count  # images of this pass; the others had features before
    pass_s: Seconds  # seconds that they took
    predicted_pass_s: Seconds  # the same, predicted

    @property
    def mean_tokens(self) -> int:
        """Tokens of an image in the mean."""
        return round(self.num_tokens / self.num_images)

    @property
    def encoded_s(self) -> float | None:
        """Seconds of the pass; None if all had features before."""
        return self.pass_s if self.num_encoded else None

    @property
    def times(self) -> tuple[float, float]:
        """Seconds of the pass, predicted and measured."""
        return self.predicted_pass_s, self.pass_s

    @property
    def row(self) -> Row:
        """How many there are, and their size."""
        size = shown_gib(self.feature_bytes)
        note = f"distinct, {self.mean_tokens:,} tokens each, {size} on disk"
        return Row("", "images", self.num_images, "", note)

    @property
    def line(self) -> str:
        """All of it in words."""
        took = "their features were there before"
        if self.num_encoded:
            took = f"{self.num_encoded:,} encoded in {shown_time(self.pass_s)}"
            took += f" (predicted {shown_time(self.predicted_pass_s)})"
        return (
            f"{self.num_images:,} distinct, {self.mean_tokens:,} tokens each in the mean,"
            f" {shown_gib(self.feature_bytes)} on disk"
            f" (predicted {shown_gib(self.predicted_bytes)}); {took}"
        )


def images_html(images: Sequence[str]) -> str:
    """Return small images as HTML, numbered; nothing for none.

    Args:
        images: `data:` URIs of images.
    """
    shown = "".join(
        f'<img src="{escape(uri)}" alt="image {number}">'
        for number, uri in enumerate(images, start=1)
    )
    return f'<span class="images">{shown}</span>' if shown else ""


def pictured(text: str, images: Sequence[str]) -> Drawn:
    """Return a text that pages show with small images above it."""
    found = Drawn(text)
    found.html = images_html(images) + escape(text)
    return found


_FILE = JsonFile(
    holds=ImageFigures,
    error=CheckpointError,
    limit="it is written whole, before step 1",
    hint="remove it: the report then leaves it out",
)


def write_images(run_dir: Path, figures: ImageFigures) -> None:
    """Write what the pass over a run's images took; of a resumed run, if it has encoded some."""
    file = run_dir / IMAGE_FIGURES
    if figures.num_encoded or not file.exists():
        write_atomically(file, sealed_json(figures.model_dump_json(indent=1)))


def read_images(run_dir: Path) -> ImageFigures | None:
    """Return what the pass over a run's images took; None where rows have none.

    Raises:
        CheckpointError: The file is damaged.
    """
    file = run_dir / IMAGE_FIGURES
    if not file.exists():
        return None
    return ImageFigures.model_validate(read_sealed(_FILE, file))


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
