"""The same model on other cards, on several, or trained in full."""
