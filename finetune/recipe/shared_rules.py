"""What the recipes of runs that train together must have in common."""

from collections.abc import Sequence

from finetune.errors import ConfigError
from finetune.recipe.recipe import Recipe

SECTIONS = ("model", "offload")
FIELDS = (
    "train.neftune_alpha",
    "train.router_loss_coef",
)


def require_shared(runs: Sequence[tuple[str, Recipe]]) -> None:
    """Check that runs agree in what is the model's and the engine's.

    Args:
        runs: The name and the recipe of each.

    Raises:
        ConfigError: They do not, or one has a setting that has no place among several.
    """
    first_name, first = runs[0]
    for name, recipe in runs:
        _require_apart(name, recipe)
        for path in _shared_paths(first):
            values = _value(first, path), _value(recipe, path)
            if values[0] != values[1]:
                raise ConfigError(
                    f"{path} is {values[0]} in {first_name} and {values[1]} in {name}",
                    limit="runs over one stream of the base share the sections `model` and"
                    f" `offload`, {', '.join(FIELDS)}, and train.seed where the base is random or"
                    " has a new head",
                    hint=f"one value of `{path}` for all, or a sweep for each",
                )


def _shared_paths(recipe: Recipe) -> list[str]:
    sections = [f"{name}.{field}" for name in SECTIONS for field in _fields(recipe, name)]
    is_drawn = recipe.model.init == "random" or recipe.model.head != "tokens"
    seed = ["train.seed"] if is_drawn else []
    return [*sections, *FIELDS, *seed]


def _fields(recipe: Recipe, section: str) -> list[str]:
    return list(type(getattr(recipe, section)).model_fields)


def _value(recipe: Recipe, path: str) -> object:
    section, _, field = path.partition(".")
    return getattr(getattr(recipe, section), field)


def _require_apart(name: str, recipe: Recipe) -> None:
    """Check that a run trains an adapter, and has nothing of which a process has only one."""
    if recipe.train.is_full:
        raise ConfigError(
            f"train.what is {recipe.train.what} in {name}",
            limit="runs share a base that does not train; each trains an adapter",
            hint="`train.what: adapter`, or `sluice finetune` for each run",
        )
    if recipe.train.is_head_alone:
        raise ConfigError(
            f"train.what is head in {name}",
            limit="runs share the loads of layers, and steps of a head alone load none",
            hint="`train.what: adapter`, or `sluice finetune` for each run",
        )
    if recipe.train.is_sharded:
        raise ConfigError(
            f"train.parallel is fsdp2 in {name}",
            limit="runs share one stream of their base; here nothing is streamed",
            hint="`train.parallel: stream`, or `sluice finetune` for each run",
        )
    if recipe.adapter.method != "lora":
        raise ConfigError(
            f"adapter.method is {recipe.adapter.method} in {name}",
            limit="runs share their steps with LoRA adapters",
            hint="`adapter.method=lora`, or `sluice finetune` for each run",
        )
    if recipe.train.compile:
        raise ConfigError(
            f"train.compile is true in {name}",
            limit="layers are compiled for one adapter; compiled anew for each, their number is"
            " limited, and nobody has shown that bits stay those of the run alone",
            hint="`train.compile=false`, or `sluice finetune` for each run",
        )
    if recipe.report.profile is not None:
        raise ConfigError(
            f"report.profile is {recipe.report.profile} in {name}",
            limit="a profile is of a whole process, and several runs share it",
            hint="`report.profile=null`",
        )
    if "wandb" in recipe.report.log_to:
        raise ConfigError(
            f"report.log_to names wandb in {name}",
            limit="a process logs one run to Weights & Biases",
            hint="`report.log_to=[tensorboard]`",
        )
