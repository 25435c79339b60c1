"""How many micro-batches of a step each rank takes."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction


def apportioned(
    num: int, shares: Sequence[float], *, most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return whole numbers in proportion to shares, which add up to `num` (largest remainders).

    Of equal remainders the first has precedence. Nobody gets nothing if there are enough.

    Args:
        num: What is shared out.
        shares: The share of each, above 0.
        most: The most that each may get; None for no limit.
    """
    least, limits = int(num >= len(shares)), most or [num] * len(shares)
    total = sum(map(Fraction, shares))
    exact = [num * Fraction(share) / total for share in shares]
    counts = [min(limit, max(least, math.floor(x))) for limit, x in zip(limits, exact, strict=True)]
    while sum(counts) != num:
        step = 1 if sum(counts) < num else -1
        may = [i for i, count in enumerate(counts) if least <= count + step <= limits[i]]
        counts[max(may, key=lambda i: step * (exact[i] - counts[i]))] += step
    return tuple(counts)


def fastest_shares(
    steps_s: Sequence[Callable[[int], float]],
    fit: Sequence[Callable[[int], bool]],
    *,
    num: int,
) -> tuple[int, ...] | None:
    """Return the micro-batches of each rank with which the slowest rank's step is shortest.

    From numbers in proportion to the ranks' rates, one micro-batch after the other goes from the
    slowest rank to the one that is fastest with one more. If a rank's step is no shorter with more
    micro-batches, none that ends here is better: of a faster one the slowest rank would have fewer
    micro-batches, so that another had more, whose step would be shorter than the slowest's.

    Args:
        steps_s: Of each rank, the time of its step with so many micro-batches, which fit.
        fit: Of each rank, whether a step of so many fits; if it does, so do fewer.
        num: Micro-batches of the step.

    Returns:
        At least one for each rank; None if they do not fit.
    """
    numbers = range(1, num - len(fit) + 2)
    most = [bisect_left(numbers, 1, key=lambda n: int(not fits(n))) for fits in fit]
    if min(most) < 1 or sum(most) < num:
        return None
    even = [min(limit, max(1, num // len(most))) for limit in most]
    rates = [n / step_s(n) for n, step_s in zip(even, steps_s, strict=True)]
    counts = best = apportioned(num, rates, most=most)
    best_s = math.inf
    while True:
        times_s = [step_s(count) for step_s, count in zip(steps_s, counts, strict=True)]
        if max(times_s) > best_s:  # a step was shorter with more
            return best
        best, best_s = counts, max(times_s)
        slowest = times_s.index(best_s)
        others = [i for i in range(len(counts)) if i != slowest and counts[i] < most[i]]
        if counts[slowest] == 1 or not others:
            return best
        more_s = {i: steps_s[i](counts[i] + 1) for i in others}
        fastest = min(others, key=more_s.__getitem__)
        if more_s[fastest] >= best_s:
            return best
        counts = tuple(count + (i == fastest) - (i == slowest) for i, count in enumerate(counts))
