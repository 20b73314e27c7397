"""The training step, the loop around it, validation, checkpoints and exact resume."""
