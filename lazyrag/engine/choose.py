"""The next tokens of a pass: chosen where the logits are, fetched together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from lazyrag.engine.forward import Launched
from lazyrag.engine.sampling import Sampler, draw_rows
from lazyrag.errors import LazyRagError


def choose(launched: Launched, samplers: Sequence[Sampler]) -> list[int | LazyRagError]:
    """What `Sampler.next` would choose of each row.

    Answers that take the likeliest token, and those that draw with the same options, cost one copy
    from the device together; only those under a constraint or a repetition penalty are chosen one
    by one.

    Args:
        launched: a pass; no later one may have been launched unless all take the likeliest.
        samplers: one a row of its logits.

    Returns:
        An id a row, or the error of a row whose logits are not finite.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, sampler in enumerate(samplers):
        if sampler.kind is not None and sampler.warpers:
            groups.setdefault(sampler.kind, []).append(row)
    drawn = []
    for rows in groups.values():
        uniform = torch.tensor([samplers[row].uniform() for row in rows], dtype=torch.float64)
        where = torch.tensor(rows).to(launched.logits.device)
        scores = launched.logits.index_select(0, where)
        drawn.append((rows, draw_rows(scores, samplers[rows[0]].warpers, uniform)))
    ids, tops = launched.likeliest()
    for rows, tokens in drawn:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            ids[row] = token
    outcomes: list[int | LazyRagError] = []
    for row, (sampler, id, top) in enumerate(zip(samplers, ids, tops, strict=True)):
        try:
            if sampler.kind is None:
                outcomes.append(sampler.next(launched.logits[row]))
            else:
                outcomes.append(sampler.accept(id, top))
        except LazyRagError as error:
            outcomes.append(error)
    return outcomes
