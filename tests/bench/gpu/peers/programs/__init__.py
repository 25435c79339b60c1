"""One program for each peer, run by the peer's Python: torch and the peer, nothing of ours."""
