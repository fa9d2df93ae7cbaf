"""Command line: thin commands over the engine and its LlamaIndex integration."""
