"""The batch plan for people: counts, pictures and words, and what `python -m hydraflow.plan` prints."""
