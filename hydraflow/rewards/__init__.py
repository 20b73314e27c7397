"""Scores of responses: built-in and custom functions, and the processes that run them."""
