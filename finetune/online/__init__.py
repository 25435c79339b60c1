"""Rounds that sample answers, reward them and learn from them."""
