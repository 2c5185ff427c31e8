"""What engines' prefix caches hold, by the KV cache events that vLLM and SGLang publish over ZeroMQ."""
