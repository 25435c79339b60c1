"""The local page: what a plan answers at once to changed questions, and live runs of a folder."""
