"""Checks that this machine has what a configuration needs: one file per topic, run by `python -m
hydraflow.doctor`."""
