"""Hugging Face models for the engines: loading, packing, exact log-probabilities, kernels."""
