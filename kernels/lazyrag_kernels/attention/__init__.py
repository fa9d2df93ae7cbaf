"""Lazy attention: the query is rotated per segment, the stored keys never (arXiv 2606.04302)."""

from lazyrag_kernels.attention.batch import (
    AttentionLayer,
    Batch,
    LiveSpan,
    NodeSpan,
    Pages,
    RequestRows,
)
from lazyrag_kernels.attention.cpu import CpuStep
from lazyrag_kernels.attention.encode import attend_behind_prefix
from lazyrag_kernels.attention.reference import reference_attention

__all__ = [
    "AttentionLayer",
    "Batch",
    "CpuStep",
    "LiveSpan",
    "NodeSpan",
    "Pages",
    "RequestRows",
    "attend_behind_prefix",
    "reference_attention",
]
