"""One run: preflight, plan, model on its engine, steps, samples, report."""
