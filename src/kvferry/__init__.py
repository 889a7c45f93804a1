"""kvferry carries KV cache from prefill engines to decode engines of vLLM."""

__version__ = "0.1.0"
