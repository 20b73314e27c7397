"""What travels between the controller and the workers: batches, their columns, their bytes."""
