"""Norms, rotary embedding and gated activations, each in one kernel; DoRA's scales of outputs."""
