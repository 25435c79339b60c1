"""Norms, rotary embedding and gated activations of a layer, each in one kernel."""
