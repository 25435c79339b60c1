"""The formats of rows: to be repeated, or with answers to compare."""

SUPERVISED = ("messages", "alpaca", "sharegpt", "prompt_completion", "text")
COMPARED = ("preference", "ranking", "labelled", "sampled")
