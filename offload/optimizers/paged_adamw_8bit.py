"""AdamW in 8 bits whose moments the driver moves to the host while the device is full.

Source: bitsandbytes 0.50 optim/optimizer.py.
"""

from offload.optimizers import adamw_8bit
from offload.plan.facts.optimizer import Optimizer

EXTENSION = Optimizer(
    doc="keeps its moments in 8 bits, in host memory too where the card is full",
    states=adamw_8bit.states,
    made_by="bitsandbytes.optim.adamw:PagedAdamW8bit",
    update_bytes=28,
    num_ops=16,
    min_paged=100_000,
    instead="adamw_8bit",
    aliases=("paged_adamw_8bit",),
)
