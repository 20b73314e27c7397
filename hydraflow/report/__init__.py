"""One page about a run, or about several side by side: `python -m hydraflow.report`."""
