"""A question of the Plan room: a model, a machine, a step and a data set, as one frozen value.

Its fields are what the page's controls set. A question becomes a recipe in one place, so what is
planned and what "show the recipe" gives are the same settings.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from finetune.errors import ConfigError
from finetune.model.config import is_hub_reachable
from finetune.planning.request import facts_of
from finetune.planning.subject import HUB_ID, NO_ROWS, Subject
from finetune.recipe.load import recipe_from
from finetune.recipe.objective_section import Method
from finetune.recipe.recipe import Recipe, whole_units
from finetune.recipe.section import Section
from finetune.recipe.shipped import find_shape, published_ids, shipped_shapes
from finetune.recipe.yaml_source import Draft
from offload.plan.facts.codec import CodecName
from offload.plan.machine.machine import CARD_NAMES, GIB, Machine, named_machine

HERE = "this machine"
CONFIG = "config.json"
NAME = "from-studio"
Trained = Literal["lora", "dora", "all", "loha", "lokr", "ia3", "vera", "oft", "miss"]
WITHOUT_RANK = ("ia3", "all")
COUNTED_BY_PEFT = ("loha", "lokr", "ia3", "vera", "oft", "miss")
"""Methods whose modules are counted with torch and peft."""


class Setup(Section):
    """What is planned."""

    model: str = Field(description="A shipped shape, a hub id, or `config.json` with its text.")
    config: str | None = Field(default=None, max_length=2**20, description="Of a pasted model.")
    card: str = Field(description="A named card, or `this machine`.")
    num_cards: int = Field(ge=1, le=16, description="Cards that share a step.")
    ram_gib: float | None = Field(default=None, ge=1, le=1e6, description="Of a named card's host.")
    link_gb_per_s: float | None = Field(default=None, ge=0.1, le=1e6, description="Likewise.")
    method: Trained = Field(description="An adapter's method, or `all` weights of the model.")
    rank: int = Field(ge=1, le=4096, description="Of the adapter, where its method has one.")
    codec: Literal["auto"] | CodecName = Field(description="Form in which layers wait.")
    objective: Method = Field(description="What is learned from the rows.")
    seq_len: int = Field(ge=8, le=2**24, description="Tokens of a sequence.")
    tokens_per_step: int = Field(ge=8, le=2**24, description="Cut to whole micro-batches.")
    micro_batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        description="Sequences per forward."
    )

    @property
    def source(self) -> str:
        """The model as a recipe names it: its hub id, or its folder."""
        hub_ids = published_ids()
        return "my-model" if self.model == CONFIG else hub_ids.get(self.model, self.model)

    @property
    def is_here(self) -> bool:
        """Whether it is about this machine."""
        return self.card == HERE

    def recipe_values(self, source: str) -> dict[str, Any]:
        """Return the settings of the recipe that is planned, those that are no defaults.

        Args:
            source: Where the model is.
        """
        adapter: dict[str, Any] = {} if self.method in WITHOUT_RANK else {"rank": self.rank}
        if self.method in ("lora", "dora"):
            adapter |= {"alpha": float(2 * self.rank)}
            adapter |= {"dora": True} if self.method == "dora" else {}
        elif self.method != "all":
            adapter["method"] = self.method
        size = 1 if self.micro_batch_size == "auto" else self.micro_batch_size
        train: dict[str, Any] = {
            "seq_len": self.seq_len,
            "micro_batch_size": self.micro_batch_size,
            "tokens_per_step": whole_units(self.tokens_per_step, self.seq_len * size),
            "epochs": 1,
        }
        if self.method == "all":
            train |= {"what": "all"} | ({"parallel": "fsdp2"} if self.num_cards > 1 else {})
        return {
            "model": {"path": source},
            **({"adapter": adapter} if adapter else {}),
            "data": {"path": NO_ROWS},
            **({} if self.objective == "sft" else {"objective": {"method": self.objective}}),
            "train": train,
            **({} if self.codec == "auto" else {"offload": {"codec": self.codec}}),
            "output": {"name": NAME},
        }


class Work(Section):
    """What the plan is to be used for: how much, and at which prices."""

    data_tokens: int = Field(ge=0, le=10**15, description="Tokens that are trained on in all.")
    price_per_hour: float = Field(ge=0, le=1e9, description="Of the machine, as if rented.")
    power_watts: float = Field(ge=0, le=1e9, description="Of the machine, as it trains.")
    price_per_kwh: float = Field(ge=0, le=1e9, description="Of electricity.")


class Question(Section):
    """All that the page asks."""

    setup: Setup
    work: Work
    zoom: int = Field(default=1, ge=1, le=16, description="How wide the step is drawn.")


def recipe_text(setup: Setup) -> str:
    """Return the recipe of a setup as YAML that `sluice plan` and `sluice finetune` read."""
    values = setup.recipe_values(setup.source)
    comments = [f"# {command(setup)}", "# data.path: put the file of your rows here"]
    if setup.num_cards > 1:
        comments.append(
            f"# {setup.num_cards} cards: `accelerate launch --multi_gpu"
            f" --num_processes {setup.num_cards}` shares a step among them"
        )
    if setup.model == CONFIG:
        comments.append(f"# model.path: the folder of your {CONFIG} and weights")
    return "\n".join(comments) + "\n\n" + yaml.safe_dump(values, sort_keys=False)


def command(setup: Setup) -> str:
    """Return the command that plans the recipe for the same machine."""
    words = [f"sluice plan {NAME}.yaml"]
    if not setup.is_here:
        words.append(f"--machine {setup.card}")
        words += [] if setup.ram_gib is None else [f"--ram {setup.ram_gib:g}"]
        words += [] if setup.link_gb_per_s is None else [f"--link {setup.link_gb_per_s:g}"]
    words += [f"--gpus {setup.num_cards}"] if setup.num_cards > 1 else []
    return " ".join(words)


def subject(setup: Setup, *, folder: Path) -> Subject:
    """Return the recipe and the model's facts.

    Args:
        setup: What is planned.
        folder: Where a pasted config is written, by its hash.

    Raises:
        ConfigError: There is no such model, or settings contradict each other.
    """
    recipe = _recipe(setup, _model_path(setup, folder=folder))
    return Subject(name=setup.model, recipe=recipe, facts=facts_of(recipe.model))


def machine(setup: Setup, *, here: Machine | None) -> Machine:
    """Return the machine of a setup.

    Args:
        setup: What is planned.
        here: This machine, as it was measured; None where it cannot be.

    Raises:
        ConfigError: It is no known card, or this machine is not known.
        MachineError: The card does not compute in bfloat16.
    """
    if setup.is_here:
        if here is None:
            raise ConfigError(
                f"{HERE} was not measured",
                hint="`sluice studio`, which measures it, or take a named card",
            )
        return here
    if setup.card not in CARD_NAMES:
        raise ConfigError(
            f"{setup.card} is no known card",
            limit=f"known are {', '.join(CARD_NAMES)}",
            hint="take one of the list",
        )
    link = setup.link_gb_per_s
    return named_machine(
        setup.card,
        ram_bytes=None if setup.ram_gib is None else int(setup.ram_gib * GIB),
        link_bytes_per_s=None if link is None else link * 1e9,
    )


def _recipe(setup: Setup, path: str) -> Recipe:
    draft = Draft(name="the page")
    draft.values.update(setup.recipe_values(path))
    return recipe_from(draft, Path("/"), check_files=False)


def _model_path(setup: Setup, *, folder: Path) -> str:
    """Return the path or hub id of the model; no path of the user's is read."""
    if setup.model == CONFIG:
        text = setup.config or ""
        held = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        held.mkdir(parents=True, exist_ok=True)
        (held / CONFIG).write_text(text, encoding="utf-8")
        return str(held)
    if setup.model in shipped_shapes():
        return str(find_shape(setup.model).absolute())
    is_id = HUB_ID.fullmatch(setup.model) is not None and not Path(setup.model).exists()
    if is_id and (setup.model in published_ids().values() or is_hub_reachable()):
        return setup.model
    raise ConfigError(
        f"{setup.model} is no shipped model, and no id on the hub that can be reached",
        limit=f"shipped are {', '.join(published_ids())}",
        hint=f"paste the model's {CONFIG}",
    )
