"""The contents of engines' prefix caches, from the KV cache events that vLLM and SGLang publish over ZeroMQ."""
