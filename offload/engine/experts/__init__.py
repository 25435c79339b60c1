"""Adapters on fused experts, computed alongside the frozen products and never merged."""
