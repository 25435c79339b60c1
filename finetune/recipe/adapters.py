"""What adapters there are, each with its settings, and how peft and a sentence name it.

A method of peft's on linear layers, or of virtual tokens, is a row of `METHODS`, or an entry point
of another package. Its config in peft, its fields there and the settings of a recipe are all that
differs; no other file names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from finetune.recipe.extensions import Choice, chosen
from offload.registry import Registry

# Upper limits of an adapter: no step that trains comes near these.
MAX_RANK = MAX_VIRTUAL = 2**16

Names = Annotated[tuple[str, ...], Field(strict=False)]
Rank = Annotated[int, Field(ge=1, le=MAX_RANK)]
_NONE: Mapping[str, Any] = MappingProxyType({})


class AdapterSection(Choice):
    """What is trained: an adapter, and modules trained whole."""

    default: ClassVar[str] = "lora"
    every = staticmethod(lambda: ADAPTERS)

    @property
    def stated(self) -> "Adapter":
        """What its method states of itself."""
        return ADAPTERS[self.method]

    @property
    def as_lora(self) -> "LoraSection":
        """The settings in LoRA's form, with LoRA's defaults for those that the method lacks."""
        own = {name: value for name, value in self if name in LoraSection.model_fields}
        return LoraSection.model_construct(**own | {"method": "lora"})

    @property
    def num_in_front(self) -> int:
        """Virtual tokens in front of each row, which takes positions from there on."""
        num: int = dict(self).get("num_virtual_tokens", 0)
        return num

    @property
    def num_in_rows(self) -> int:
        """Those of them that are tokens of the row, and not a prefix of each layer's keys."""
        return self.num_in_front if self.stated.kind == "rows" else 0

    def peft_config(self, **others: object) -> Any:
        """Return peft's settings of the adapter, with others of its config."""
        stated = self.stated
        module, _, config = stated.config.partition(":")
        own = {theirs: getattr(self, name) for name, theirs in stated.fields.items()}
        return getattr(import_module(module), config)(**own, **stated.fixed, **others)


ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


class LinearSection(AdapterSection):
    """An adapter on linear layers."""

    targets: Literal["all-linear", "attention"] | Names = Field(
        default="all-linear",
        description="Linear layers with an adapter: a group, or a list such as [q_proj, v_proj].",
    )
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="Run directory, or folder in peft's format, whose adapter the run goes on from,"
        " with a new optimizer; rank, alpha and targets are the same. Null: a new adapter.",
        examples=["runs/quickstart"],
    )
    modules_to_save: Names = Field(
        default=(),
        description="Trained whole with the adapter: norms, router, embed_tokens, lm_head, or"
        " linears; an objective with a head of its own adds that, score.",
        examples=[["norms", "router"]],
    )

    def chosen_targets(self, known: Sequence[str]) -> tuple[str, ...]:
        """Return what the list names, or the group, of the linear layers that a model has."""
        if not isinstance(self.targets, str):
            return self.targets
        group = known if self.targets == "all-linear" else ATTENTION_LINEARS
        return tuple(x for x in known if x in group and x not in self.modules_to_save)


class LoraSection(LinearSection):
    """A product of two matrices of low rank, added to what each linear layer returns."""

    method: Literal["lora"] = chosen("lora")
    rank: Rank = Field(default=16, description="Columns of A, rows of B.")
    alpha: float = Field(
        default=32.0, gt=0, description="Scale: the update is multiplied by alpha / rank."
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout on the adapter's input while training."
    )
    experts: bool = Field(
        default=False,
        description="Whether the fused experts of a mixture-of-experts model get adapters too.",
    )
    rank_pattern: dict[str, Rank] = Field(
        default={},
        description="Rank of single projections, by name: q_proj, or experts.down_proj.",
        examples=[{"q_proj": 32}],
    )
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="Alpha of single projections, by name: q_proj, or experts.down_proj.",
        examples=[{"q_proj": 64.0}],
    )
    rslora: bool = Field(
        default=False,
        description="Whether the update is multiplied by alpha / sqrt(rank) (rsLoRA).",
    )
    dora: bool = Field(
        default=False,
        description="Whether linear layers also learn the norm of each output's weights (DoRA).",
    )
    compute_dtype: Literal["auto", "float32"] = Field(
        default="auto",
        description="Precision of the products of A and B on linear layers: `auto`, that of the"
        " weights that they adapt, or float32, as peft computes.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type in which A and B are kept and saved. With `bfloat16` each update is"
        " computed in float32, and its result rounded up or down at random, the nearer the"
        " likelier.",
    )
    loraplus_ratio: float | None = Field(
        default=None,
        gt=1,
        description="How many times `train.lr` the B matrices learn at (LoRA+); null: at the same.",
        examples=[16],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A method of adapters, of this project or of another package's entry point."""

    settings: type[AdapterSection]  # what `adapter` holds where it is chosen
    summary: str  # what it is, in a sentence of the reference
    peft_type: str  # its type in the file that peft saves
    title: str  # its name in sentences
    config: str = ""  # `module:class` of peft's settings; empty for LoRA, which has code of its own
    fields: Mapping[str, str] = field(default_factory=dict)  # setting -> its name in that class
    fixed: Mapping[str, object] = field(default_factory=dict)  # other fields of that class
    # Names in peft's file that change what the adapter's tensors compute, with spaces between.
    computed: str = ""
    # Names there that only describe its training, or that its tensors show too.
    others: str = ""
    # What it is: LoRA, modules of peft's on linear layers, or virtual tokens, which are tokens of
    # rows, or a prefix of keys and values in each layer.
    kind: Literal["lora", "modules", "rows", "prefix"] = "modules"
    has_encoder: bool = False  # whether layers of its own return what virtual tokens are
    # Whether all layers share its tensors that do not train, as large as the largest needs.
    shares_frozen: bool = False

    @property
    def is_virtual(self) -> bool:
        """Whether it is virtual tokens, and changes no weight."""
        return self.kind in ("rows", "prefix")


_SETTINGS: Mapping[str, Any] = {
    "rank": (Rank, Field(default=16, description="Rank of what is added.")),
    "alpha": (float, LoraSection.model_fields["alpha"]),
    "dropout": (float, LoraSection.model_fields["dropout"]),
    "num_virtual_tokens": (
        Annotated[int, Field(ge=1, le=MAX_VIRTUAL)],
        Field(default=20, description="Virtual tokens in front of each row."),
    ),
}


def by_peft(
    name: str,
    summary: str,
    config: str,
    *,
    fields: Mapping[str, str] = _NONE,
    settings: Mapping[str, Any] = _NONE,
    peft_type: str = "",
    base: type[AdapterSection] = LinearSection,
    **stated: Any,
) -> Adapter:
    """Return a method of peft's.

    Of its settings, those with the name of one of LoRA's have the meaning that it has there.

    Args:
        name: Value of `adapter.method`.
        summary: What it is, in a sentence of the reference.
        config: `module:class` of peft's settings.
        fields: Setting -> its name in that class; with its name here, where it is `rank`, `alpha`
            or `dropout`, all is said of it.
        settings: Type and `Field` of other settings, or of these.
        peft_type: See `Adapter`; the name in capitals if empty.
        base: What the settings are a subclass of.
        stated: More of `Adapter`.
    """
    literal: Any = Literal
    own = {one: {**_SETTINGS, **settings}[one] for one in fields}
    method = (literal[name], chosen(name))
    section: Any = create_model(name, __base__=base, __doc__=summary, method=method, **own)
    return Adapter(
        settings=section,
        summary=summary,
        config=config,
        fields=fields,
        peft_type=peft_type or name.upper(),
        title=name,
        **stated,
    )


def _virtual(name: str, summary: str, config: str, *, others: str, **stated: Any) -> Adapter:
    """Return a method of virtual tokens."""
    sizes = "num_virtual_tokens token_dim num_transformer_submodules num_attention_heads num_layers"
    return by_peft(
        name,
        summary,
        config,
        fields={"num_virtual_tokens": "num_virtual_tokens"},
        others=f"{sizes} {others}",
        base=AdapterSection,
        **stated,
    )


METHODS = (
    Adapter(
        settings=LoraSection,
        summary=LoraSection.__doc__ or "",
        peft_type="LORA",
        kind="lora",
        title="LoRA",
        computed="lora_alpha alpha_pattern use_rslora use_dora lora_bias fan_in_fan_out",
        others="r rank_pattern lora_dropout init_lora_weights target_parameters"
        " ensure_weight_tying eva_config corda_config loftq_config lora_ga_config"
        " megatron_core qalora_group_size",
    ),
    by_peft(
        "loha",
        "The elementwise product of two matrices of low rank, added to each weight.",
        "peft:LoHaConfig",
        fields={"rank": "r", "alpha": "alpha"},
        computed="alpha alpha_pattern use_effective_conv2d",
        others="r rank_pattern rank_dropout module_dropout init_weights",
    ),
    by_peft(
        "lokr",
        "A Kronecker product of two matrices, added to each weight.",
        "peft:LoKrConfig",
        fields={"rank": "r", "alpha": "alpha"},
        computed="alpha alpha_pattern use_effective_conv2d decompose_both decompose_factor",
        others="r rank_pattern rank_dropout rank_dropout_scale module_dropout init_weights",
    ),
    by_peft(
        "ia3",
        "A scale for each output of a linear layer, or each input of the one that ends an MLP.",
        "peft:IA3Config",
        computed="feedforward_modules fan_in_fan_out",
        others="init_ia3_weights",
    ),
    by_peft(
        "vera",
        "Two vectors for each linear layer, around random matrices that all layers share.",
        "peft:VeraConfig",
        fields={"rank": "r", "dropout": "vera_dropout"},
        computed="fan_in_fan_out",
        others="r projection_prng_key save_projection vera_dropout d_initial init_weights",
        shares_frozen=True,
    ),
    by_peft(
        "oft",
        "A rotation of each linear layer's inputs, in blocks.",
        "peft:OFTConfig",
        fields={"rank": "r"},
        settings={"rank": (Rank, Field(default=16, description="Number of blocks."))},
        fixed={"oft_block_size": 0},  # blocks have a number, in place of their size
        computed="coft eps block_share use_cayley_neumann num_cayley_neumann_terms fan_in_fan_out",
        others="r oft_block_size module_dropout init_weights",
    ),
    by_peft(
        "miss",
        "An update of each weight in blocks of as many inputs as the rank.",
        "peft:MissConfig",
        fields={"rank": "r", "dropout": "miss_dropout"},
        computed="init_weights mini_r",
        others="r miss_dropout",
    ),
    by_peft(
        "hira",
        "A matrix of low rank, times the weight element by element, added to it.",
        "peft:HiraConfig",
        fields={"rank": "r", "dropout": "hira_dropout"},
        computed="fan_in_fan_out",
        others="r rank_pattern hira_dropout init_weights",
    ),
    _virtual(
        "prompt",
        "Virtual tokens in front of each row, whose embeddings train; rows are longer by them"
        " than `train.seq_len`.",
        "peft:PromptTuningConfig",
        peft_type="PROMPT_TUNING",
        others="prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs",
        kind="rows",
    ),
    _virtual(
        "p_tuning",
        "Virtual tokens in front of each row, which an encoder that trains returns; rows are"
        " longer by them than `train.seq_len`.",
        "peft:PromptEncoderConfig",  # whose MLP is as wide as the model
        others="encoder_reparameterization_type encoder_hidden_size encoder_num_layers"
        " encoder_dropout",
        kind="rows",
        has_encoder=True,
    ),
    _virtual(
        "prefix",
        "Keys and values of virtual tokens in each layer, in front of a row's own.",
        "peft:PrefixTuningConfig",
        kind="prefix",
        fixed={"prefix_projection": False},
        peft_type="PREFIX_TUNING",
        others="encoder_hidden_size prefix_projection",
    ),
    _virtual(
        "prefix_mlp",
        "Keys and values of virtual tokens in each layer, which an MLP that trains returns.",
        "peft:PrefixTuningConfig",
        kind="prefix",
        fixed={"prefix_projection": True},
        peft_type="PREFIX_TUNING",
        others="encoder_hidden_size prefix_projection",
        has_encoder=True,
    ),
)
ADAPTERS: Registry[Adapter] = Registry(
    "adapters", {one.settings.model_fields["method"].default: one for one in METHODS}, Adapter
)
