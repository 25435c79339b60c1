"""The image tower of a model: what its pass over images costs, as counted on the empty model."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerFacts:
    """A frozen tower and its projector, which turn the patches of an image into features."""

    num_parameters: int  # weights of all of it
    block_parameters: int  # of these, weights of its layers, which every patch passes
    num_blocks: int  # its layers
    width: int  # features of a patch in them
    patch_size: int  # pixels of a patch's side
    patches_per_token: int  # patches that are merged into the place of a token
    num_added: int = 0  # layers of the language model after which features are added (deepstack)
    # Layers of the language model in which the tokens of an image see each other, by a mask.
    seen_whole: Literal["in none", "in those with a window", "in all"] = "in none"

    @property
    def other_parameters(self) -> int:
        """Weights outside its layers, which every token of an image passes."""
        return self.num_parameters - self.block_parameters

    @property
    def features_per_token(self) -> int:
        """Rows of features of a token: what takes its place, and what is added after layers."""
        return 1 + self.num_added

    def is_masked(self, window: int | None) -> bool:
        """Return whether a row with images has a mask in layers with this window, or with none."""
        return self.seen_whole == "in all" or (
            self.seen_whole == "in those with a window" and window is not None
        )

    def pixels(self, num_tokens: int) -> int:
        """Return the pixels that become so many tokens."""
        return num_tokens * self.patches_per_token * self.patch_size**2
