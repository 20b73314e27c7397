"""This machine: files, folders, logs, network interfaces, Slurm's allocation, and how a command ends."""
