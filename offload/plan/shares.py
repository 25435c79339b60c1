"""How many micro-batches of a step each rank takes."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction


def apportioned(num: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Return whole numbers in proportion to shares, which add up to `num` (largest remainders).

    Of equal remainders the first has precedence. Nobody gets nothing if there are enough.

    Args:
        num: What is shared out.
        shares: At least 1 each.
    """
    least = 1 if num >= len(shares) else 0
    exact = [Fraction(num * share, sum(shares)) for share in shares]
    counts = [max(least, math.floor(one)) for one in exact]
    while sum(counts) != num:
        step = 1 if sum(counts) < num else -1
        lacking = [step * (one - count) for one, count in zip(exact, counts, strict=True)]
        may = [i for i, count in enumerate(counts) if count + step >= least]
        counts[max(may, key=lambda i: lacking[i])] += step
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
    most = [_most(fits, num - len(fit) + 1) for fits in fit]
    if min(most) < 1 or sum(most) < num:
        return None
    counts = best = _proportional(steps_s, most, num)
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


def _most(fits: Callable[[int], bool], num: int) -> int:
    """Return with how many micro-batches, up to `num`, a rank's step fits."""
    return bisect_left(range(1, num + 1), 1, key=lambda n: int(not fits(n)))


def _proportional(
    steps_s: Sequence[Callable[[int], float]], most: Sequence[int], num: int
) -> tuple[int, ...]:
    """Return numbers within their limits, about in proportion to the ranks' rates."""
    even = [min(limit, max(1, num // len(most))) for limit in most]
    rates = [n / step_s(n) for n, step_s in zip(even, steps_s, strict=True)]
    exact = [num * rate / sum(rates) for rate in rates]
    counts = [min(limit, max(1, int(one))) for limit, one in zip(most, exact, strict=True)]
    while sum(counts) != num:
        step = 1 if sum(counts) < num else -1
        may = [i for i, n in enumerate(counts) if 1 <= n + step <= most[i]]
        counts[max(may, key=lambda i: step * (exact[i] - counts[i]))] += step
    return tuple(counts)
