"""The section `offload` of a recipe: where the weights lie, and how they travel."""

from typing import Annotated, Literal

from pydantic import Field

from finetune.recipe.section import Section
from offload.plan.facts.codec import CodecName
from offload.plan.machine.machine import GIB, Tier


class OffloadSection(Section):
    """Where the base weights lie and how they travel."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="What computes; `auto` takes CUDA where there is one."
    )
    tier: Literal["auto", "ram", "disk"] = Field(
        default="auto",
        description="Where layers wait that are in no slot: `ram`, or a file on `disk`.",
    )
    codec: Literal["auto"] | CodecName = Field(
        default="auto",
        description="Form in which the layers' matrices wait: `native` is `model.dtype`,"
        " `bf16_packed` the same in 3/4 of bf16's bytes, `nf4` about 4 bits; `auto` takes the"
        " faster of the first two, which round nothing.",
    )
    num_slots: Literal["auto", "all"] | Annotated[int, Field(ge=2)] = Field(
        default="auto",
        description="Layers that the device holds at a time; `all` makes the model resident.",
    )
    kept_graphs: Literal["auto", "all"] | Annotated[int, Field(ge=0)] = Field(
        default="auto",
        description="Layers, from the last, that the backward does not compute again because what"
        " autograd saved of them stays on the device; `auto` takes as many as fit and pay.",
    )
    sent_graphs: Literal["auto", "none"] = Field(
        default="auto",
        description="Whether other layers are not computed again either, because what autograd"
        " saved of them waits in page-locked memory; `auto` sends as many as fit and pay.",
    )
    attention_outputs: Literal["auto", "none"] = Field(
        default="auto",
        description="Whether outputs of fused attention wait for the backward, which then does not"
        " compute it again, on the device or in page-locked memory; `auto` keeps and sends as many"
        " as fit and pay.",
    )
    stash: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="Where the layers' inputs wait for the backward; `host` saves device memory.",
    )
    head_chunk: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Labelled tokens whose logits exist at a time; `auto` takes 1,024, or 256 or 64"
        " where a step would not fit otherwise.",
    )
    mlp_chunk: Literal["auto", "whole"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Tokens that an MLP computes at a time; `auto` takes `whole`, or 8,192, 2,048"
        " or 512 where a step would not fit otherwise.",
    )
    vram_budget: Literal["auto"] | Annotated[float, Field(gt=0, le=1_000_000)] = Field(
        default="auto",
        description="Device memory that the plan may use, in GiB; `auto` takes what is free.",
    )
    embeddings: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="Where the input embedding waits; from `host`, each micro-batch brings the rows"
        " of its tokens. One that trains is on the device. `auto` takes `host` where a step would"
        " not fit otherwise. If the head has its weight, both are in one place.",
    )
    head: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="Where the output head waits; from `host`, it is copied once per step over the"
        " slots of layers that are needed again last. One that trains is on the device. `auto`"
        " takes `host` where a step would not fit otherwise, even with the embedding in RAM. If it"
        " has the embedding's weight, both are in one place.",
    )

    @property
    def layer_codec(self) -> CodecName:
        """The codec of layers while they wait; `auto` is lossless."""
        return "native" if self.codec == "auto" else self.codec

    @property
    def load_tier(self) -> Tier:
        """The tier that the layers are loaded to."""
        return "disk" if self.tier == "disk" else "ram"

    @property
    def vram_budget_bytes(self) -> int | None:
        """The budget in bytes; None where the plan takes what is free."""
        return None if self.vram_budget == "auto" else int(self.vram_budget * GIB)
