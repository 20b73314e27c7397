"""What each command does, from its configuration to its run folder."""
