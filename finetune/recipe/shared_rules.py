"""What the recipes of runs that train together must have in common."""

from collections.abc import Sequence

from finetune.errors import ConfigError
from finetune.recipe.recipe import Recipe, setting

SECTIONS = ("model", "offload")
FIELDS = (
    "train.neftune_alpha",
    "train.router_loss_coef",
)


_ALONE = "or `sluice finetune` for each run"


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
            values = setting(first, path), setting(recipe, path)
            if values[0] != values[1]:
                raise ConfigError(
                    f"{path} is {values[0]} in {first_name} and {values[1]} in {name}",
                    limit="runs over one stream of the base share the sections `model` and"
                    f" `offload`, {', '.join(FIELDS)}, and train.seed where the base is random or"
                    " has a new head",
                    hint=f"one value of `{path}` for all, or a sweep for each",
                )


def _shared_paths(recipe: Recipe) -> list[str]:
    sections = [
        f"{name}.{field}" for name in SECTIONS for field in type(getattr(recipe, name)).model_fields
    ]
    is_drawn = recipe.model.init == "random" or recipe.model.head != "tokens"
    seed = ["train.seed"] if is_drawn else []
    return [*sections, *FIELDS, *seed]


def _require_apart(name: str, recipe: Recipe) -> None:
    """Check that a run trains an adapter, and has nothing of which a process has only one."""
    train = recipe.train
    for path, is_possible, limit, hint in (
        (
            "train.what",
            not train.is_full,
            "runs share a base that does not train; each trains an adapter",
            f"`train.what: adapter`, {_ALONE}",
        ),
        (
            "train.what",
            not train.is_head_alone,
            "runs share the loads of layers, and steps of a head alone load none",
            f"`train.what: adapter`, {_ALONE}",
        ),
        (
            "train.parallel",
            not train.is_sharded,
            "runs share one stream of their base; here nothing is streamed",
            f"`train.parallel: stream`, {_ALONE}",
        ),
        (
            "adapter.method",
            recipe.adapter.method == "lora",
            "runs share their steps with LoRA adapters",
            f"`adapter.method=lora`, {_ALONE}",
        ),
        (
            "train.compile",
            not train.compile,
            "layers are compiled for one adapter; compiled anew for each, their number is limited,"
            " and nobody has shown that bits stay those of the run alone",
            f"`train.compile=false`, {_ALONE}",
        ),
        (
            "report.profile",
            recipe.report.profile is None,
            "a profile is of a whole process, and several runs share it",
            "`report.profile=null`",
        ),
    ):
        if not is_possible:
            value = "true" if path == "train.compile" else setting(recipe, path)
            raise ConfigError(f"{path} is {value} in {name}", limit=limit, hint=hint)
    if "wandb" in recipe.report.log_to:
        raise ConfigError(
            f"report.log_to names wandb in {name}",
            limit="a process logs one run to Weights & Biases",
            hint="`report.log_to=[tensorboard]`",
        )
