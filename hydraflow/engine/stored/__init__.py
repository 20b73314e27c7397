"""engine/stored: checkpoints on disk, read a block of rows at a time, by whoever needs which tensor."""
