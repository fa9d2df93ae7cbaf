"""One request, from its read prompt to its report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lazyrag.engine.climb import Climb
from lazyrag.engine.constraint import Constraint
from lazyrag.engine.report import NodeReport, NodeStatus, Origin, Reason, ReuseReport, Tier
from lazyrag.errors import RequestError, RequestTimeoutError
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.read import NearNode, ReadPrompt
from lazyrag.prompt.segments import NodeRun, PlacedPrompt, as_live, end_live, place
from lazyrag.quality.ladder import Climbed, Standing
from lazyrag.quality.scale import PLAIN, Scale
from lazyrag.types import GenerationOptions, NodeKey, Quality

DEFAULT_NEW_TOKENS = 256

_LIVE = (Reason.QUALITY_FULL, Reason.LAST_TOKEN, Reason.CHOSEN)
"""Reasons of nodes that were computed as live text."""
_NEAR = {"changed": Reason.CHANGED, "cut": Reason.CUT, "quoted": Reason.QUOTED}


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt placed and checked, ready to run.

    Attributes:
        prompt: what is live, what is reused, where.
        known: the nodes of the prompt, before the quality setting made some of them live.
        near: nodes the prompt almost holds.
        warnings: what could not be used.
        options: how to decode.
        constraint: what the answer may become, None = anything; it serves one run.
        new_tokens: at most this many are generated.
        recognise_s: seconds that reading the prompt (and its JSON Schema) took.
        deadline: of ``time.perf_counter``, after which the request is stopped.
        climb: how to go on once it is known which nodes the question attends to; None = the prompt
            is as it is to be read.
        looked, look_s: tokens (times the share of layers) and seconds that finding out took.
        origins: where nodes came from that finding out has brought already.
        scale: of attention to reused nodes.
    """

    prompt: PlacedPrompt
    known: tuple[Standing, ...]
    near: tuple[NearNode, ...]
    warnings: tuple[str, ...]
    options: GenerationOptions
    constraint: Constraint | None
    new_tokens: int
    recognise_s: float
    deadline: float | None
    climb: Climb | None = None
    looked: float = 0.0
    look_s: float = 0.0
    origins: Mapping[NodeKey, Origin] = field(default_factory=dict)
    scale: Scale = PLAIN

    @classmethod
    def from_prompt(
        cls,
        read: ReadPrompt,
        options: GenerationOptions,
        constraint: Constraint | None,
        model: LoadedModel,
        started: float,
    ) -> Request:
        """Place the prompt as given and check that it fits the context window, before any work.

        Args:
            read: the prompt.
            options, constraint: of the answer.
            model: that answers.
            started: of ``time.perf_counter``, when the request came.

        Raises:
            RequestError: prompt and answer do not fit; says by how much.
        """
        recognise_s = time.perf_counter() - started
        runs = end_live(read.runs)
        known = [Standing(node.run, node.offset) for node in place(runs).nodes]
        if len(known) < sum(isinstance(run, NodeRun) for run in read.runs):  # one token, the last
            last = place(read.runs).nodes[-1]
            known.append(Standing(replace(last.run, used=0), last.offset))
        if options.quality is Quality.FULL:
            runs = as_live(runs)
        prompt = place(runs)
        return cls(
            prompt=prompt,
            known=tuple(known),
            near=tuple(read.near),
            warnings=tuple(read.warnings),
            options=options,
            constraint=constraint,
            new_tokens=_new_tokens(prompt, options, model),
            recognise_s=recognise_s,
            deadline=None if options.timeout_s is None else started + options.timeout_s,
        )

    def climbed(self, climbed: Climbed, warnings: Sequence[str] = ()) -> Request:
        """The request over its prompt as a rung of the ladder has it: as long, so that it fits."""
        standing = list(climbed.nodes)
        for one in self.known[len(standing) :]:  # one token, the last of the prompt
            standing.append(replace(one, given=len(standing)))
        return replace(
            self,
            prompt=place(climbed.runs),
            known=tuple(standing),
            warnings=(*self.warnings, *warnings),
            climb=None,
            looked=climbed.looked,
        )

    @classmethod
    def of_nodes(cls, read: ReadPrompt) -> Request:
        """A request for nodes alone, of which nothing is computed."""
        prompt = place(read.runs)
        return cls(
            prompt=prompt,
            known=tuple(Standing(node.run, node.offset) for node in prompt.nodes),
            near=(),
            warnings=tuple(read.warnings),
            options=GenerationOptions(quality=Quality.FAST),
            constraint=None,
            new_tokens=0,
            recognise_s=0.0,
            deadline=None,
        )

    def check_time(self) -> None:
        """Called between forward passes.

        Raises:
            RequestTimeoutError: the request has taken longer than it may.
        """
        if self.deadline is not None and time.perf_counter() > self.deadline:
            raise RequestTimeoutError(
                f"the request took longer than its timeout of {self.options.timeout_s:g} s and was "
                "stopped. Allow more time, retrieve less, or ask for fewer new tokens."
            )

    @property
    def spent_s(self) -> float:
        """Seconds that were spent on it before it was put in line as it is."""
        return self.recognise_s + self.look_s

    @property
    def ids(self) -> list[int]:
        """Every id of the prompt (nodes first; the order does not matter to the sampler)."""
        ids = [id for node in self.prompt.nodes for id in node.run.ids[: node.run.used]]
        return ids + list(self.prompt.live_ids)

    def report(self, origins: Mapping[NodeKey, Origin], live_reused: int = 0) -> ReuseReport:
        """The report as far as it is known before decoding.

        Args:
            origins: of every reused node; empty with ``quality="full"``.
            live_reused: leading live tokens that were computed before.
        """
        assert self.options.quality is not None, "the engine has decided"
        report = ReuseReport(quality=self.options.quality, recognise_s=self.recognise_s)
        report.warnings = list(self.warnings)
        report.prompt_tokens = self.prompt.tokens
        report.live_tokens_reused = live_reused
        report.tokens_computed = len(self.prompt.live_ids) - live_reused
        report.tokens_looked, report.look_s = self.looked, self.look_s
        report.node_temperature, report.node_lse_scale = self.scale
        bytes_read: Counter[Tier] = Counter()
        counted: set[NodeKey] = set()
        computed = {key: one for key, one in origins.items() if one.reason is not None}
        found = {**origins, **self.origins, **computed}
        for one in self.known:
            run = one.run
            origin = found.get(run.key, Origin(Tier.NONE, 0, Reason.QUALITY_FULL))
            if run.key not in counted:  # those computed anew were brought for the look
                counted.add(run.key)
                bytes_read[origin.tier] += origin.nbytes
                if origin.reason is not None and origin.reason not in _LIVE:
                    report.tokens_computed += run.tokens_to_compute
            if not run.used:
                origin = Origin(Tier.NONE, 0, Reason.LAST_TOKEN)
            elif one.anew:
                origin = Origin(Tier.NONE, 0, Reason.CHOSEN)
            if origin.reason is None:
                report.tokens_reused += run.used
            status = NodeStatus.REUSED if origin.reason is None else NodeStatus.RECOMPUTED
            report.nodes.append(
                NodeReport(
                    run.key,
                    len(run.ids),
                    one.offset,
                    origin.tier,
                    status,
                    origin.reason,
                    one.given,
                )
            )
        report.bytes_by_tier = {tier: nbytes for tier, nbytes in bytes_read.items() if nbytes}
        for near in self.near:
            report.nodes.append(
                NodeReport(
                    near.key,
                    near.tokens,
                    near.before,
                    Tier.NONE,
                    NodeStatus.RECOMPUTED,
                    _NEAR[near.kind],
                )
            )
        report.nodes.sort(key=lambda node: node.offset)
        return report


def _new_tokens(prompt: PlacedPrompt, options: GenerationOptions, model: LoadedModel) -> int:
    window = model.geometry.max_positions
    furthest = max(
        [prompt.next_position]
        + [position + 1 for position in prompt.live_positions]
        + [node.offset + node.run.used for node in prompt.nodes]
    )
    if min([0, *prompt.live_positions, *(node.offset for node in prompt.nodes)]) < 0:
        raise RequestError("a segment has a negative offset: positions start at 0.")
    left = window - max(furthest, prompt.tokens)
    wanted = options.max_new_tokens
    reach = f" and reaches position {furthest:,}" if furthest > prompt.tokens else ""
    demanded = wanted is not None and not options.shorten
    if left < 1 or (demanded and wanted is not None and wanted > left):
        asked = f" and {wanted:,} new tokens" if wanted is not None else ""
        raise RequestError(
            f"the prompt has {prompt.tokens:,} tokens{reach}{asked}; the context window of "
            f"{model.name!r} is {window:,}. Retrieve fewer or shorter nodes, shorten the question, "
            "or ask for fewer new tokens."
        )
    return min(DEFAULT_NEW_TOKENS if wanted is None else wanted, left)
