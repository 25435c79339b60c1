"""AdamW of weights in RAM with the mean of gradients in bf16."""

from offload.optimizers._bf16 import with_mean_in_bf16

EXTENSION = with_mean_in_bf16(
    "adamw",
    doc="keeps the mean of gradients in bf16 (only for weights of the model)",
    core_s=3.3e-9,  # 1.6 times what AdamW takes there in fp32
)
