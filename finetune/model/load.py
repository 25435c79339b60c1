"""The model and its tokenizer: how they are found and built."""

import contextlib
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from finetune.env import has_proxy, is_offline
from finetune.errors import ConfigError, ModelError, read_by_library, reading_config
from finetune.model.attention import compute_exactly
from finetune.model.checkpoint import load_published, model_around, weights_folder
from finetune.model.store import Contents, WeightFiles, identity, store_path
from finetune.recipe.shipped import load_shape, shipped_shapes
from offload.errors import StoreError
from offload.plan.facts.codec import CodecName
from offload.plan.machine.machine import ExpertsImplementation

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from finetune.recipe.sections import ModelSection
    from offload.engine.host.layer_layout import Record
    from offload.engine.host.slab import Slab
    from offload.engine.host.store import Hold, Store
    from offload.engine.model.load_hook import OnPut

_CONNECT_TIMEOUT_S = 3.0
_UNSEEN = (
    "The layers were loaded at once and not one by one (this version of transformers is not known):"
    " they take their memory twice until training starts."
)
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")

# ------------------------------------------------------------------------------------------ config


def read_config(section: "ModelSection") -> dict[str, Any]:
    """Return the model's config as Hugging Face writes it, without loading torch.

    A hub id is looked up in the local cache, then among the shipped shapes, then on the hub.

    Raises:
        ModelError: The config is nowhere to be found.
        ConfigError: The file is not a config.
    """
    if section.config is not None:
        return load_shape(section.config)
    path = section.path
    assert path is not None
    if Path(path).exists():
        return load_shape(path)
    found = cached_file(path, "config.json")
    if found is not None:
        return load_shape(str(found))
    shape = path.rsplit("/", 1)[-1].lower()
    if shape in shipped_shapes():
        return load_shape(shape)
    return _hub_config(path)


def cached_file(hub_id: str, name: str) -> Path | None:
    """Return a file of a hub repository from the local cache, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):
        found = try_to_load_from_cache(hub_id, name)
        if isinstance(found, str):
            return Path(found)
    return None


def is_hub_reachable() -> bool:
    """Return within seconds whether the hub answers; its client would retry for half a minute."""
    from huggingface_hub import constants

    if is_offline():
        return False
    if has_proxy():
        return True
    host = urlsplit(constants.ENDPOINT)
    port = host.port or (80 if host.scheme == "http" else 443)
    try:
        socket.create_connection((host.hostname or "", port), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def has_weights(path: str) -> bool:
    """Return whether a model's weights are on this machine."""
    if Path(path).is_dir():
        return any(Path(path).glob("*.safetensors"))
    return any(
        cached_file(path, name) is not None
        for name in ("model.safetensors", "model.safetensors.index.json")
    )


def _hub_config(hub_id: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if not is_hub_reachable():
        raise ModelError(
            f"model.path: {hub_id} is no local directory and not in the cache",
            limit="the Hugging Face hub cannot be reached",
            hint="`model.path: DIR` with a downloaded model, or a shipped shape"
            f" ({', '.join(shipped_shapes())}) as `model.config`",
        )
    try:
        return load_shape(hf_hub_download(hub_id, "config.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(
            f"model.path: {hub_id} has no config.json on the hub ({type(error).__name__})",
            limit="it must be a repository that you may read",
            hint=f"look at https://huggingface.co/{hub_id}, or run `hf auth login`",
        ) from error


# --------------------------------------------------------------------------------- model, tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model on the host.

    Attributes:
        model: The model; to its callers an ordinary one.
        hold: Where its layers' weights are stored; None if each parameter has its own memory.
        notes: What the user should know about it.
    """

    model: "PreTrainedModel"
    hold: "Hold | None"
    notes: tuple[str, ...] = ()


def load_model(
    section: "ModelSection",
    *,
    codec: CodecName,
    device: str,
    seed: int,
    tier: Literal["ram", "disk"],
    experts_implementation: ExpertsImplementation | None,
    make_slab: "Callable[[Sequence[Record]], Slab] | None" = None,
    on_put: "OnPut" = lambda _done, _all: None,
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
    from offload.engine.experts.autotune import use
    from offload.engine.experts.interface import goes_through_interface
    from offload.engine.host.slab import Slab
    from offload.engine.model.find_layers import find_towers
    from offload.engine.model.load_hook import Stowing

    if section.init == "random":
        loaded = Loaded(model=_random_model(section, seed), hold=None)
    elif tier == "disk" or codec != "native":
        loaded = _load_from_store(section, codec, device, on_put)
        if tier == "ram":
            loaded = _into_memory(loaded, make_slab or Slab)
    else:
        assert section.path is not None
        make = make_slab or Slab
        with Stowing(
            lambda records, _: make(records), is_loaded=_is_loaded, on_put=on_put
        ) as stowing:
            model = load_published(section.path, section.dtype)
        loaded = Loaded(model=model, hold=stowing.hold, notes=() if stowing.hold else (_UNSEEN,))
    for tower in find_towers(loaded.model):  # for images or sound: text needs none of it
        tower.to("meta")
    compute_exactly(loaded.model)
    if experts_implementation is not None:
        for module in loaded.model.modules():
            if goes_through_interface(module):
                use(experts_implementation, module)
    return loaded


def set_router_loss(model: "PreTrainedModel", coefficient: float | None) -> None:
    """Set the coefficient of a mixture's router loss; 0 turns it off, None changes nothing."""
    if coefficient is None:
        return
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.output_router_logits = coefficient > 0
    if hasattr(model, "router_aux_loss_coef"):  # one without is refused when it is attached
        vars(model)["router_aux_loss_coef"] = coefficient


def experts_of(section: "ModelSection") -> "nn.Module | None":
    """Return the first fused experts whose code can be chosen, as they compute; without weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from offload.engine.experts.autotune import find_experts

    config = _config_of(section)
    with reading_config(str(section.config or section.path)), torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, section.dtype))
    return find_experts(empty)


def _config_of(section: "ModelSection") -> "PreTrainedConfig":
    from transformers import AutoConfig

    fields = read_config(section)
    model_type = fields.pop("model_type")
    with reading_config(str(section.config or section.path)):
        return AutoConfig.for_model(model_type, **fields)


def _random_model(section: "ModelSection", seed: int) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), reading_config(str(section.config or section.path)):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            _config_of(section), dtype=getattr(torch, section.dtype)
        )
    return model


def _into_memory(loaded: Loaded, make_slab: "Callable[[Sequence[Record]], Slab]") -> Loaded:
    """Read the layers of a model that was built around a store into a slab."""
    from offload.engine.host.store import Store
    from offload.engine.model.layers import LayeredModel

    store = loaded.hold
    assert isinstance(store, Store)
    store.adopt([list(layer.parameters()) for layer in LayeredModel(loaded.model).layers])
    slab = make_slab(store.records)
    store.move_to(slab)
    store.close()
    return replace(loaded, hold=slab)


def _load_from_store(
    section: "ModelSection", codec: CodecName, device: str, on_put: "OnPut"
) -> Loaded:
    """Build the model around the store of its weights, which is written first if necessary."""
    from offload.engine.host.store import Store
    from offload.engine.host.store_writer import sole_builder

    path, dtype = section.path, section.dtype
    assert path is not None
    file = store_path(path, dtype, codec)
    with sole_builder(file):
        try:
            store, notes = _open_store(path, dtype, codec, file)
        except StoreError as error:
            notes = (
                f"Built the store anew: {error.what}."
                if file.exists()
                else f"Wrote the layers of {path} to {file}.",
            )
            contents = _build_store(path, dtype, codec, file, device, on_put)
            store = Store(file, identity=identity(contents, dtype, codec))
    model = model_around(store.tensors(), path=path, dtype=dtype, source=str(store.path))
    return Loaded(model=model, hold=store, notes=notes)


def _open_store(
    path: str, dtype: str, codec: CodecName, file: Path
) -> "tuple[Store, tuple[str, ...]]":
    """Open a store, after checking that the weights are still those that it was made from.

    Raises:
        StoreError: There is none, or it has to be built again.
    """
    from offload.engine.host.store import Store, require_store, unusable

    require_store(file)  # before all weights are read for one that is not there
    config = Path(path, "config.json") if Path(path).is_dir() else cached_file(path, "config.json")
    if config is None:
        raise unusable(file, f"{path} is not in the cache")
    files = WeightFiles(config.parent, file)
    contents = files.recorded()
    if contents is not None:
        return Store(file, identity=identity(contents, dtype, codec)), ()
    store = Store(file, identity=identity(files.read(), dtype, codec))
    note = f"Files of {path} were touched, so all were read again: they hold what {file} holds."
    return store, (note,)


def _build_store(
    path: str, dtype: str, codec: CodecName, file: Path, device: str, on_put: "OnPut"
) -> Contents:
    """Write a store; return the contents of the files that it was made from."""
    import torch

    from offload.engine.host.store_writer import StoreWriter
    from offload.engine.model.load_hook import Stowing

    make_writer = partial(StoreWriter, file, encoding_device=torch.device(device))
    files = WeightFiles(weights_folder(path), file)
    with Stowing(make_writer, codec=codec, is_loaded=_is_loaded, on_put=on_put) as stowing:
        with files.reading() as contents:
            model = load_published(path, dtype)
        writer = stowing.hold
        if writer is None:
            raise ModelError(
                f"model.path: {path} was loaded and no weight of its layers was seen",
                limit="the disk tier writes each as transformers registers it",
                hint="`offload.tier: ram`, or another version of transformers",
            )
        writer.finish(_all_but(model, writer.names), identity(contents, dtype, codec))
    return contents


def _is_loaded(parameter: "torch.nn.Parameter") -> bool:
    """Return whether a parameter is from the weights; transformers marks those to skip init."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def _all_but(model: "PreTrainedModel", names: Collection[str]) -> dict[str, "torch.Tensor"]:
    """Return the model's other parameters and buffers; tied ones once, by their first name."""
    state = model.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: state[name].detach() for name in first_names.values() if name not in names}


def load_tokenizer(source: str | None) -> "PreTrainedTokenizerBase":
    """Load a tokenizer and make sure that it can pad.

    Raises:
        ConfigError: No source was given.
        ModelError: There is no tokenizer at the source.
    """
    from transformers import AutoTokenizer

    if source is None:
        raise ConfigError(
            "model.tokenizer: null, and `model.config` names no tokenizer",
            limit="rows must become tokens",
            hint="`model.tokenizer: DIR` or a hub id with the same vocabulary",
        )
    folder = Path(source)
    if folder.is_dir():
        _require_vocabulary(folder)
    elif cached_file(source, "tokenizer_config.json") is None:
        _require_hub(source)
    with read_by_library(
        f"the tokenizer in {source} cannot be read",
        error=ModelError,
        limit="it must hold tokenizer.json, or the files that its class needs",
        hint="download it again, or `model.tokenizer: DIR` or a hub id",
    ):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source,
            trust_remote_code=False,  # unasked, it would ask on the terminal
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _require_vocabulary(folder: Path) -> None:
    """Refuse a folder for which transformers would make up an empty tokenizer."""
    if not any((folder / name).exists() for name in _VOCABULARY_FILES):
        raise ModelError(
            f"no tokenizer in {folder}",
            limit=f"it must hold one of {', '.join(_VOCABULARY_FILES)}",
            hint="`model.tokenizer: DIR` or a hub id",
        )


def _require_hub(source: str) -> None:
    if not is_hub_reachable():
        raise ModelError(
            f"the tokenizer {source} is no local directory and not in the cache",
            limit="the Hugging Face hub cannot be reached",
            hint="`model.tokenizer: DIR` with a downloaded tokenizer",
        )
