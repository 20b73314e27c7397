"""Worker groups on Ray: their processes, how a call's batch is split among them, and failure handling."""
