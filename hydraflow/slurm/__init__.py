"""Jobs on a Slurm cluster: `python -m hydraflow.slurm submit`, and what the job's scripts ask on its
nodes."""
