"""How strongly reused nodes are attended to (APE, arXiv 2502.05431)."""

from __future__ import annotations

from typing import NamedTuple


class Scale(NamedTuple):
    """Of attention to the reused nodes of a request.

    Attributes:
        temperature: scores of their keys are divided by it.
        lse_scale: their log-sum-exp is multiplied by it before live text joins.
    """

    temperature: float = 1.0
    lse_scale: float = 1.0


PLAIN = Scale()
"""Attention as the model has it."""
