"""Looks at this machine for what a configuration needs: one file per topic, run by `python -m
hydraflow.doctor`."""
