"""Hugging Face models as the engines need them: loaded, packed, with exact log-probabilities."""
