"""The next tokens of a pass: chosen where the logits are, fetched together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from lazyrag.engine.forward import Launched
from lazyrag.engine.sampling import Sampler, draw_rows


def choose(launched: Launched, samplers: Sequence[Sampler | None]) -> list[int | Exception | None]:
    """What `Sampler.next` would choose of each row.

    Answers that take the likeliest token, and those that draw with the same options, cost one copy
    from the device together; only those under a constraint or a repetition penalty are chosen one
    by one.

    Args:
        launched: a pass; no later one may have been launched unless all take the likeliest.
        samplers: one a row of its logits; None = nothing is to be chosen of this row.

    Returns:
        An id a row, or what went wrong with that row alone.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, sampler in enumerate(samplers):
        if sampler is not None and sampler.kind is not None and sampler.warpers:
            groups.setdefault(sampler.kind, []).append(row)
    drawn = []
    for rows in groups.values():
        of_kind = [sampler for row in rows if (sampler := samplers[row]) is not None]
        uniform = torch.tensor([sampler.uniform() for sampler in of_kind], dtype=torch.float64)
        where = torch.tensor(rows).to(launched.logits.device)
        scores = launched.logits.index_select(0, where)
        drawn.append((rows, draw_rows(scores, of_kind[0].warpers, uniform)))
    ids, tops = launched.likeliest()
    for rows, tokens in drawn:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            ids[row] = token
    outcomes: list[int | Exception | None] = []
    for row, (sampler, id, top) in enumerate(zip(samplers, ids, tops, strict=True)):
        if sampler is None:
            outcomes.append(None)
            continue
        try:
            if sampler.kind is None:
                outcomes.append(sampler.next(launched.logits[row]))
            else:
                outcomes.append(sampler.accept(id, top))
        except Exception as error:
            outcomes.append(error)
    return outcomes
