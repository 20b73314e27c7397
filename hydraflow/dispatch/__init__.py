"""Worker groups on Ray: their processes, how a call's batch is divided among them, and how they fail."""
