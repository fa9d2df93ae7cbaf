"""Writing keys and values into pages."""

from lazyrag_kernels.kv_write.cpu import write_kv

__all__ = ["write_kv"]
