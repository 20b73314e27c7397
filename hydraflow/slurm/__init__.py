"""Jobs on a Slurm cluster: `python -m hydraflow.slurm submit`, and the commands that its scripts call on the
nodes."""
