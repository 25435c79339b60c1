"""Which of the ranks that share a slab updates each layer whose own weights train."""

from collections.abc import Sequence
from dataclasses import replace

from offload.plan.time.costs import Costs


def owners_of(trained: Sequence[int], *, num_ranks: int) -> tuple[int | None, ...]:
    """Return the rank of a machine that updates each layer; None where nothing trains.

    In forward order each layer goes to the rank with the least to update so far, the first of
    equals. So equal layers are dealt out in turn, and the updates of all ranks together end in the
    order in which the next forward needs them.

    Args:
        trained: What trains of each layer, in forward order: its weights, or their bytes.
        num_ranks: That share the slab.
    """
    loads = [0] * num_ranks
    owners: list[int | None] = []
    for number in trained:
        owner = loads.index(min(loads)) if number else None
        owners.append(owner)
        if owner is not None:
            loads[owner] += number
    return tuple(owners)


def owned_by(rank: int, trained: Sequence[int], *, num_ranks: int) -> frozenset[int]:
    """Return the layers that a rank of a machine updates; arguments as of `owners_of`."""
    owners = owners_of(trained, num_ranks=num_ranks)
    return frozenset(layer for layer, owner in enumerate(owners) if owner == rank)


def owned_around(rank: int, sizes: Sequence[int], *, num_ranks: int) -> frozenset[int]:
    """Return which weights around the layers a rank of a machine updates, by number.

    All are updated at once, so the largest are dealt out first.

    Args:
        rank: Of the machine.
        sizes: Of the weights.
        num_ranks: Of the machine.
    """
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    owners = owners_of([sizes[number] for number in order], num_ranks=num_ranks)
    return frozenset(n for n, owner in zip(order, owners, strict=True) if owner == rank)


def with_owners(costs: Costs, trained: Sequence[int], *, num_ranks: int) -> Costs:
    """Return the costs of a step of the first rank of a machine, whose ranks share the updates.

    The updates of all run at once on the cores and the memory of one machine: each takes as many
    times longer. All begin with the step, and each rank makes its own in forward order. A rank
    waits for those of others in this order too, for each from the end of the wait before. What is
    around the layers has owners as well, whose updates together take as long as those of one.

    Args:
        costs: With the updates of a process that has the machine to itself.
        trained: As of `owners_of`.
        num_ranks: That share the slab.
    """
    owners = owners_of(trained, num_ranks=num_ranks)
    ends_s, waited_s = [0.0] * num_ranks, 0.0
    layers = []
    for layer, owner in zip(costs.layers, owners, strict=True):
        update_s, await_s = num_ranks * layer.update_s, None
        if owner is not None:
            ends_s[owner] += update_s
        if owner:
            await_s = max(0.0, ends_s[owner] - waited_s)
            waited_s += await_s
        layers.append(replace(layer, update_s=update_s, await_s=await_s))
    return replace(costs, layers=tuple(layers))
