"""Rows whose answers are compared: tokenised, and kept together in a step."""
