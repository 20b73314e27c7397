"""A stand-in for SGLang, of which only the server is there: `python -m sglang.launch_server`."""
