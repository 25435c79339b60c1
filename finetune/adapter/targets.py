"""The linear layers that `adapter.targets` of a recipe means."""

from collections.abc import Sequence

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


def chosen_targets(
    targets: str | Sequence[str], *, known: Sequence[str], modules_to_save: Sequence[str]
) -> tuple[str, ...]:
    """Return the linear layers that a group or list names; a group skips those trained whole.

    Args:
        targets: `all-linear`, `attention`, or names.
        known: The linear layers that the model has.
        modules_to_save: What is trained whole.
    """
    if targets == "all-linear":
        chosen: Sequence[str] = known
    elif targets == "attention":
        chosen = [name for name in known if name in ATTENTION_LINEARS]
    else:
        return tuple(targets)
    return tuple(name for name in chosen if name not in modules_to_save)
