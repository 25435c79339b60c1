"""The checks that decide whether a model may be computed layer by layer: see `check.check`."""
