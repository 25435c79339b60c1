"""A model on the host: random, or its published weights where they wait for the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from finetune.errors import reading_config
from finetune.model.checkpoint import is_loaded, load_published, model_around
from finetune.model.config import model_folder
from finetune.model.empty import compute_exactly, config_of, model_class
from finetune.model.store import layer_store
from finetune.recipe.sections import ModelSection
from offload.engine.experts.autotune import use
from offload.engine.experts.products import goes_through_interface
from offload.engine.host.slab import Record, Slab
from offload.engine.host.store import Backing, Store
from offload.engine.model.capture import CaptureWeights, OnPut
from offload.engine.model.layers import LayeredModel, find_towers
from offload.plan.facts.codec import NATIVE
from offload.plan.machine.machine import ExpertsImplementation, Tier

_UNSEEN = (
    "The layers were loaded at once and not one by one (this version of transformers is not known):"
    " they take their memory twice until training starts."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model on the host."""

    model: PreTrainedModel  # the model; to its callers an ordinary one
    # Where its layers' weights are stored; None if each parameter has its own memory.
    backing: Backing | None
    notes: tuple[str, ...] = ()  # what the user should know about it


def load_model(
    section: ModelSection,
    *,
    codec: str,
    device: str,
    seed: int,
    tier: Tier,
    experts_implementation: ExpertsImplementation | None,
    make_slab: Callable[[Sequence[Record]], Slab] | None = None,
    on_put: OnPut = lambda _done, _all: None,
) -> Loaded:
    """Build the model on the host, to be run on `device`.

    Published weights are loaded layer by layer to where they wait: into the slab in memory or, with
    tier `disk`, into a file that is kept for the next start. Encoded weights are first written to
    such a file in either case, so that the next start need not encode them again. Image and audio
    towers get no memory. `experts_implementation` is the expert backend; None leaves the choice to
    transformers.

    `make_slab` makes the slab of the layers' records; None makes one for this process alone.
    `on_put` is called with the progress of loading.

    Raises:
        ModelError: Weights are missing or do not match the config.
        TransferError: The disk is full.
        CodecError: Weights cannot be written by the codec.
        UnsupportedModelError: The model's layers cannot be streamed.
    """
    if section.init == "random":
        loaded = Loaded(model=random_model(section, seed), backing=None)
    elif tier == "disk" or codec != NATIVE:
        store, notes = layer_store(section, codec, device, on_put)
        loaded = Loaded(model=_around(store, section), backing=store, notes=notes)
        if tier == "ram":
            loaded = _into_memory(loaded, make_slab or Slab)
    else:
        make = make_slab or Slab
        with CaptureWeights(
            lambda records, _: make(records), is_loaded=is_loaded, on_put=on_put
        ) as captured:
            model = load_published(str(model_folder(section)), section.dtype)
        loaded = Loaded(
            model=model, backing=captured.backing, notes=() if captured.backing else (_UNSEEN,)
        )
    if section.num_outputs:
        from finetune.model.classifier_head import with_classifier_head

        classifier = with_classifier_head(
            loaded.model,
            num_outputs=section.num_outputs,
            seed=seed,
            of_tokens=section.head == "token_classes",
        )
        loaded = replace(loaded, model=classifier)
    if section.init == "pretrained":  # what an adapter names as its base
        loaded.model.name_or_path = loaded.model.config.name_or_path = str(section.path)
    for tower in find_towers(loaded.model):  # for images or sound: text needs none of it
        tower.to("meta")
    compute_exactly(loaded.model)
    if experts_implementation is not None:
        for module in loaded.model.modules():
            if goes_through_interface(module):
                use(experts_implementation, module)
    return loaded


def set_router_loss(model: PreTrainedModel, coefficient: float | None) -> None:
    """Set the coefficient of a mixture's router loss; 0 turns it off, None changes nothing."""
    if coefficient is None:
        return
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.output_router_logits = coefficient > 0
    if hasattr(model, "router_aux_loss_coef"):  # one without is refused when it is attached
        vars(model)["router_aux_loss_coef"] = coefficient


def random_model(section: ModelSection, seed: int) -> PreTrainedModel:
    """Build a model of a config with weights drawn from a seed.

    Raises:
        ModelError: transformers builds no model from the config.
    """
    source = str(section.config or section.path)
    config = config_of(section)
    kind = model_class(config, source=source)
    with torch.random.fork_rng(devices=[]), reading_config(source):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind.from_config(config, dtype=getattr(torch, section.dtype))
    return model


def _around(store: Store, section: ModelSection) -> PreTrainedModel:
    """Build the model on the tensors of a store."""
    folder = str(model_folder(section))
    return model_around(store.tensors(), path=folder, dtype=section.dtype, source=str(store.path))


def _into_memory(loaded: Loaded, make_slab: Callable[[Sequence[Record]], Slab]) -> Loaded:
    """Read the layers of a model that was built around a store into a slab."""
    store = loaded.backing
    assert isinstance(store, Store)
    store.adopt([list(layer.parameters()) for layer in LayeredModel(loaded.model).layers])
    slab = make_slab(store.records)
    store.move_to(slab)
    store.close()
    return replace(loaded, backing=slab)
