"""Names of modules as configs of quantised checkpoints list them, and their sizes of groups.

A list has names, names with wildcards, or expressions after `re:`, and each begins where its
publisher's model does. So names are compared from their layer on, and expressions are tried with
each beginning that is common.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from offload.codecs.int4 import GROUP

_BEGINNINGS = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")
_EXPRESSION = "re:"


def is_named(name: str, listed: Iterable[str]) -> bool:
    """Return whether a list names a linear layer, or a module that it is in.

    Args:
        name: From its layer on, such as `layers.3.self_attn.q_proj`.
        listed: What a config lists.
    """
    return any(
        any(re.match(one.removeprefix(_EXPRESSION), start + name) for start in _BEGINNINGS)
        if one.startswith(_EXPRESSION)
        else any(fnmatchcase(name, one[max(0, one.find("layers.")) :] + end) for end in ("", ".*"))
        for one in listed
    )


def has_int4_groups(size: int | None) -> bool:
    """Return whether groups of so many weights of a row, or whole rows (-1), are kept by `int4`."""
    return size in (None, -1) or size % GROUP == 0
