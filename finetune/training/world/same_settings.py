"""Settings of a run, which must be the same on all ranks; paths may differ by machine."""

from collections.abc import Mapping

from finetune.errors import FinetuneError
from finetune.recipe.recipe import Recipe, differences
from finetune.training.ranks import Ranks

# What is there is compared by itself, or is the main rank's alone.
OF_A_MACHINE = (
    *("model.path:", "model.config:", "model.tokenizer:", "adapter.init_from:"),
    *("data.path:", "data.mix:", "data.eval_path:", "data.num_workers:"),
    *("output.name:", "output.dir:", "report."),
)


def require_same_settings(ranks: Ranks, recipes: Mapping[str, Recipe], *, is_resume: bool) -> None:
    """Check that all ranks were started alike.

    Args:
        ranks: The processes.
        recipes: By the name of the run, as this rank was given them; of a single one by any.
        is_resume: Whether its command continues a run.

    Raises:
        FinetuneError: They were not.
    """
    first, *others = ranks.exchange((recipes, is_resume))
    for rank, (theirs, resumes) in enumerate(others, 1):
        found = _differences(first[0], theirs)
        if resumes != first[1]:
            found.append("`--resume` is given to one of them")
        if found:
            raise FinetuneError(
                f"settings on rank {rank} are not those on rank 0: {'; '.join(found)}",
                limit="ranks train one model on one order of rows, the same to the bit",
                hint="start the same command with the same recipe on each machine",
            )


def _differences(first: Mapping[str, Recipe], theirs: Mapping[str, Recipe]) -> list[str]:
    if list(first) != list(theirs):
        return [f"runs {', '.join(first)} -> {', '.join(theirs)}"]
    found = (one for name, recipe in first.items() for one in differences(recipe, theirs[name]))
    return [one for one in dict.fromkeys(found) if not one.startswith(OF_A_MACHINE)]
