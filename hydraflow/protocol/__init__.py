"""What the controller and the workers exchange: batches, their columns, their encoding."""
