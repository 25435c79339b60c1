"""Full fine-tuning: the model's own weights train, updated on the host."""
