"""Weights on their way from a trainer to whoever samples with them."""
