"""Generation engines: the native one, vLLM and SGLang; requests, sampling and received weights."""
