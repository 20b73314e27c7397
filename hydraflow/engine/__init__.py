"""Training engines: forward, backward, optimizer step and checkpoints of a model divided among ranks."""
