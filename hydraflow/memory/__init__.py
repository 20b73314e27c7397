"""The memory estimate: what a planned run needs on each device and machine, before anything starts."""
