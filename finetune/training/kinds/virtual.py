"""Virtual tokens or a prefix that train: tokens of rows, or keys and values, of no word."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from finetune.adapter.virtual_tokens import add_prefix, add_virtual_tokens
from finetune.model.load import Loaded
from finetune.training.kinds.adapter import AdapterRun
from finetune.training.run import Run

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class VirtualRun(AdapterRun):
    """See `Kind`."""

    def load(self, loaded: Loaded, runs: Sequence[Run]) -> "PeftModel | PreTrainedModel":
        """Add the virtual tokens; by a rule of recipes that share a stream there is one run."""
        (run,) = runs
        add = add_virtual_tokens if run.recipe.adapter.stated.kind == "rows" else add_prefix
        return add(loaded.model, run.recipe.adapter, seed=run.recipe.train.seed)
