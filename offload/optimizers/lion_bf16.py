"""Lion of weights in RAM with its moment in bf16."""

from offload.optimizers._bf16 import with_mean_in_bf16

EXTENSION = with_mean_in_bf16(
    "lion",
    doc="keeps its moment in bf16 (only for weights of the model)",
    core_s=3.7e-9,  # 1.6 times what Lion takes there in fp32
)
