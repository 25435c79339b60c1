"""The engine of ranks that each hold a part of the model, by torch's `fully_shard` (FSDP2)."""
