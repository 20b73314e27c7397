"""The batch plan: every batch-size number of a run, resolved, checked and explained before it starts."""
