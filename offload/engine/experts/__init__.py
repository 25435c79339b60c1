"""Adapters on fused experts, computed beside the frozen products and never merged into them."""
