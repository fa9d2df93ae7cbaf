"""Guest in transformers: load a checkpoint, read its geometry, run it with our attention."""
