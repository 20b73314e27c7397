"""What a run leaves behind: metrics, trackers, the run folder, the curve and the summary."""
