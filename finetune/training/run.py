"""One run, as a value: its recipe, its directory, its ranks, and its screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from finetune.recipe.recipe import Recipe
from finetune.report.screen import Screen, Unit, Work
from finetune.run.run_dir import RunDir
from finetune.training.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What every phase of a run needs.

    Attributes:
        recipe: What to do; its open settings are chosen with the plan.
        dir: The directory that it is kept in.
        ranks: The processes that do it together.
        device: Where this rank computes.
        screen: Where it is shown.
        is_resumed: Whether it continues what is in its directory.
        are_cards_alike: Whether all ranks compute on cards of one kind.
        adapter: Name of its adapter in a model that it shares with other runs; None where it has
            the model for itself.
    """

    recipe: Recipe
    dir: RunDir
    ranks: Ranks
    device: torch.device
    screen: Screen
    is_resumed: bool
    are_cards_alike: bool = True
    adapter: str | None = None

    @contextmanager
    def working(self, what: str, unit: Unit) -> Iterator[Work]:
        """Show the progress of some work, and let the other ranks see that it goes on.

        Args:
            what: The work in words.
            unit: What is counted.
        """
        with self.screen.working(what, unit) as show:

            def show_and_mark(done: int, total: int | None) -> None:
                self.ranks.mark()
                show(done, total)

            yield show_and_mark
