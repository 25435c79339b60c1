"""Sizes of the model and its adapter."""
