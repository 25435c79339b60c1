"""Rows that compare answers: read, tokenised, and kept together in a step."""
