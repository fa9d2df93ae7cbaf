"""Attention over a pool of position-agnostic KV pages: tensors in, tensors out, no models."""
