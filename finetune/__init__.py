"""Fine-tuning runs: from a recipe to an adapter and a report."""
