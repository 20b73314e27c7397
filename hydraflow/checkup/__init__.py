"""Checks of this machine for a configuration, one file per topic: `python -m hydraflow.doctor`."""
