"""Checkpoints on disk, read a block of rows at a time by the process that needs the tensor."""
