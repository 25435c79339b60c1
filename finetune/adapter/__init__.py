"""What trains: LoRA on linear layers and experts, modules trained whole, noise on embeddings."""
