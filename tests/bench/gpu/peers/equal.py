"""Whether two results are of the same work: the same tokens, the same tensors, the same losses."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
COUNTS = ("num_tokens", "num_trained")


def differences(
    found: Result, reference: Result, *, loss_tolerance: float, norm_tolerance: float
) -> list[str]:
    """Say where a result is of other work than the reference; empty where it is equal work.

    The first loss tells whether weights, rows and labels are the same; norms of gradients whether
    the backward is; the later losses, behind updates, whether both train alike.

    Args:
        found: A peer's.
        reference: Sluice's.
        loss_tolerance: By how much each loss may differ, as a share of the reference's.
        norm_tolerance: Likewise each norm of the gradients, where both say it.
    """
    said = [
        f"{name.removeprefix('num_')}: {found[name]:,} for {reference[name]:,}"
        for name in COUNTS
        if found[name] != reference[name]
    ]
    for name, tolerance in (("losses", loss_tolerance), ("grad_norms", norm_tolerance)):
        if len(found[name]) != len(reference[name]):
            said.append(f"{name} of {len(found[name])} steps for {len(reference[name])}")
            continue
        worst = worst_difference(found[name], reference[name])
        if not worst <= tolerance:
            said.append(f"{name} differ by up to {worst:.2%}, more than {tolerance:.2%}")
    return said


def worst_difference(found: Sequence[float | None], reference: Sequence[float | None]) -> float:
    """Return the largest difference as a share of the reference; infinite where one is no number.

    What one of them does not say, None, is left out.
    """
    worst = 0.0
    for ours, theirs in zip(found, reference, strict=True):
        if ours is None or theirs is None:
            continue
        share = abs(ours - theirs) / max(abs(theirs), 1e-12)
        worst = max(worst, share) if math.isfinite(share) else math.inf
    return worst
