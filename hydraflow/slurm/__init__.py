"""Jobs on a Slurm cluster: `python -m hydraflow.slurm submit`, and what its scripts call on nodes."""
