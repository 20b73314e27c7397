"""The memory estimate: what a planned run holds on each device and machine, before anything starts."""
