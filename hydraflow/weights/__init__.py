"""Transfer of weights from the trainer to generation engines."""
