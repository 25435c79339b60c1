"""What the launchers of all ranks must agree on, and what must be alike where these run."""

from finetune.env import Launch
from finetune.errors import FinetuneError
from finetune.training.ranks import Ranks
from finetune.training.world.surroundings import surroundings


def require_one_world(ranks: Ranks, launch: Launch) -> None:
    """Check that the launchers agree, and that what changes the last bits is alike.

    Args:
        ranks: Of one launch, which are connected.
        launch: What this rank's launcher says.

    Raises:
        FinetuneError: They do not, or it is not.
    """
    every = ranks.exchange((launch.num, launch.num_local, launch.local_index, surroundings()))
    for rank, (num, num_local, local_index, _) in enumerate(every):
        here = [r for r in range(ranks.num) if ranks.nodes[r] == ranks.nodes[rank]]
        if (num, num_local, local_index) != (ranks.num, len(here), here.index(rank)):
            raise FinetuneError(
                f"rank {rank} is number {local_index} of {num_local} on machine"
                f" {ranks.nodes[rank]}, of {num} in all",
                limit=f"by what the others say it is number {here.index(rank)} of {len(here)}"
                f" there, of {ranks.num} in all",
                hint="start all machines by the same launcher, and see that none sets RANK,"
                " LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK or WORLD_SIZE itself",
            )
    expected = every[0][3]
    for rank, (*_, found) in enumerate(every):
        other = [name for name in expected if found.get(name) != expected[name]]
        if other:
            raise FinetuneError(
                f"rank {rank} (machine {ranks.nodes[rank]}) has "
                + " and ".join(f"{name} {found.get(name)}" for name in other),
                limit="rank 0 has "
                + " and ".join(f"{name} {expected[name]}" for name in other)
                + ", and what trains must stay the same on all, to the bit",
                hint="install the same versions on all machines, and set OMP_NUM_THREADS there",
            )
