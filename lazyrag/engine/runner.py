"""Forward passes over the pool: the next tokens of several requests in one pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lazyrag.engine.attention import paged_attention
from lazyrag.engine.choose import Choice
from lazyrag.engine.climb import NO_ROOM_TO_CLIMB, Climb
from lazyrag.engine.compute import NodeComputer, reason_of
from lazyrag.engine.fetch import Fetcher
from lazyrag.engine.forward import (
    EagerLaunched,
    Launched,
    NextTokens,
    RunningSequence,
    packed_forward,
    run,
)
from lazyrag.engine.live import LiveKey, LiveNames, reusable_names
from lazyrag.engine.mass import measure
from lazyrag.engine.materialized import MaterializedSequence
from lazyrag.engine.nodes import NodePlacer, Placed
from lazyrag.engine.parallel.lead import Leader
from lazyrag.engine.pool import PagePool
from lazyrag.engine.report import Origin, Tier
from lazyrag.engine.request import Request
from lazyrag.engine.sequence import PagedSequence, SeenNode
from lazyrag.errors import RequestError
from lazyrag.model.load import LoadedModel
from lazyrag.prompt.segments import NodeRun, PlacedPrompt
from lazyrag.store import StoredKV
from lazyrag.types import NodeKey, Quality

RAW_NODES = 64
"""Nodes whose raw KV the oracle keeps in memory between requests."""

Result = int | Exception | Tensor
"""What comes of rows: the token that was chosen, why none could be, or fp32 [wanted, vocab]."""


class UnderWay:
    """A pass that was launched.

    Args:
        batch: what was launched.
        launched: the last pass.
        asynchronous: whether it may still run.
    """

    def __init__(self, batch: Sequence[NextTokens], launched: Launched, asynchronous: bool) -> None:
        self.batch = batch
        self._asynchronous = asynchronous
        self._choice = Choice(
            launched,
            [
                one.sampler if row == one.wanted - 1 else None
                for one in batch
                for row in range(one.wanted)
            ],
        )
        self._logits: list[Tensor | None] = []
        end = 0
        for one in batch:
            first, end = end, end + one.wanted
            # a captured pass has the same memory for the logits of the next one
            wanted = one.sampler is None and one.wanted > 0
            self._logits.append(launched.logits[first:end].clone() if wanted else None)

    @property
    def asynchronous(self) -> bool:
        """Whether it may still run, and the next pass need not wait for what comes of it."""
        return self._asynchronous and self._choice.on_device

    @property
    def done(self) -> bool:
        """Whether `results` waits for nothing."""
        return self._choice.done

    def results(self) -> list[Result | None]:
        """One a request; None where nothing is wanted. Waits for the pass."""
        chosen = self._choice.fetch()
        results: list[Result | None] = []
        end = 0
        for one, logits in zip(self.batch, self._logits, strict=True):
            end += one.wanted
            results.append(chosen[end - 1] if one.wanted and logits is None else logits)
        return results


class Started:
    """A request that has its pages; its nodes may still be on their way.

    Args:
        sequence: what forward passes run over.
        placed: what it holds in the pool; nothing for `Quality.MATERIALIZED`.
        origins: of nodes that are not in the pool.
    """

    def __init__(
        self,
        sequence: RunningSequence,
        placed: Placed,
        origins: Mapping[NodeKey, Origin] | None = None,
    ) -> None:
        self.sequence = sequence
        self.placed = placed
        self._origins = origins or {}

    @property
    def ready(self) -> bool:
        """Whether all its KV is in place."""
        return self.placed.ready

    @property
    def error(self) -> BaseException | None:
        """Why it never will be."""
        return self.placed.error

    @property
    def origins(self) -> dict[NodeKey, Origin]:
        """Where each node came from, once ready."""
        return {**self._origins, **self.placed.origins}

    @property
    def reused(self) -> int:
        """Leading live tokens that were computed before."""
        return self.sequence.reused if isinstance(self.sequence, PagedSequence) else 0


class Runner:
    """The model and the pool. Not thread-safe but where it is said: one worker owns it.

    Args:
        model: loaded.
        pool: of pages.
        placer: brings nodes.
        fetcher: reads nodes.
        computer: computes nodes.
        reuse_live: whether live text that was computed before is reused.
        leader: has other ranks do the same; None = there are none.
        scaled: whether requests may have a `Scale`.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: PagePool,
        placer: NodePlacer,
        fetcher: Fetcher,
        computer: NodeComputer,
        *,
        reuse_live: bool = True,
        leader: Leader | None = None,
        scaled: bool = False,
    ) -> None:
        self.model = model
        self.pool = pool
        self._placer = placer
        self._fetcher = fetcher
        self._computer = computer
        self._reuse_live = reuse_live
        self._leader = leader
        self._paged = paged_attention(pool, model.geometry, scaled=scaled)
        packed = packed_forward(model, self._paged)
        self._packed = packed if leader is None else leader.forward(packed)
        self._chosen: dict[RunningSequence, int] = {}  # by the pass that was fetched last
        self._raw: dict[NodeKey, StoredKV] = {}
        self._named: tuple[PlacedPrompt | None, Sequence[LiveKey]] = None, ()

    @property
    def shared_tokens(self) -> int:
        """See `Forward.shared_tokens`."""
        return self._packed.shared_tokens

    def check_fits(self, request: Request) -> None:
        """Refuse what the pool could not hold even when nothing else runs; from any thread.

        Raises:
            RequestError: says what is needed and what there is.
        """
        if request.options.quality is Quality.MATERIALIZED:
            if self._leader is not None:
                raise RequestError(
                    f"quality {Quality.MATERIALIZED.value!r} compares within one process: it is "
                    "not there with tensor_parallel=True."
                )
            return
        pool, size = self.pool, self.pool.page_size
        nodes = {node.run.key: len(node.run.ids) for node in request.prompt.nodes}
        tokens = [n for key, n in nodes.items() if not pool.is_pinned(key)]
        tokens.append(len(request.prompt.live_ids) + request.new_tokens)
        pages = sum(map(pool.pages_for, tokens))
        if pages > pool.total_pages - pool.pinned_pages:
            pinned = pool.pinned_pages * size
            raise RequestError(
                f"the request needs KV of {pages * size:,} tokens, the pool holds "
                f"{pool.capacity:,}{f', {pinned:,} of them pinned' if pinned else ''}. "
                "Retrieve fewer nodes or give the engine more pool_bytes."
            )

    def climbed(
        self, request: Request, climb: Climb, masses: Mapping[int, Tensor] | None = None
    ) -> Request:
        """A request on its rung, or as given where the pool cannot hold that; from any thread.

        Args:
            request: as given.
            climb: how it gets there.
            masses: what was seen, see `Climb.reach`.
        """
        made = request.climbed(*climb.reach(masses))
        try:
            self.check_fits(made)
        except RequestError:  # a node that stands twice is there once more when one is live text
            return replace(request, climb=None, warnings=(*request.warnings, NO_ROOM_TO_CLIMB))
        return made

    def prefetch(self, request: Request) -> None:
        """Begin to read what the request will need; from any thread."""
        if request.options.quality is Quality.MATERIALIZED:
            return
        for node in request.prompt.nodes:
            if not self._placer.ahead(node.run):
                return

    def rest(self) -> None:
        """Nothing runs or waits: give up what was read for requests that left."""
        self._fetcher.rest()

    def drop(self, keys: Iterable[NodeKey]) -> None:
        """Forget nodes: those in use stay until their requests have ended."""
        for key in keys:
            self._placer.forget(key)
            self._raw.pop(key, None)

    def begin(self, request: Request) -> Started | None:
        """Take pages for all of a request and have its nodes brought, or None: no room now."""
        if request.options.quality is Quality.MATERIALIZED:
            return self._begin_materialized(request)
        prompt, pool = request.prompt, self.pool
        capacity = len(prompt.live_ids) + request.new_tokens
        placed = self._placer.acquire(
            [node.run for node in prompt.nodes],
            self._reusable(request),
            capacity,
            request.options.priority,
        )
        if placed is None:
            return None
        try:
            return Started(self._sequence(request, placed, capacity), placed)
        except BaseException:
            pool.release(placed.own_pages)
            self._placer.leave(placed)
            raise

    def _sequence(self, request: Request, placed: Placed, capacity: int) -> PagedSequence:
        prompt, scale = request.prompt, request.scale
        nodes = [
            SeenNode(placed.nodes[node.run.key].pages, node.run.used, node.offset, node.first_row)
            for node in prompt.nodes
        ]
        names = LiveNames(prompt.nodes, self.pool.page_size, scale) if self._reuse_live else None
        shared = len(placed.live_names)
        positions = prompt.live_positions[: shared * self.pool.page_size]
        if names is not None:
            names.extend(prompt.live_ids[: len(positions)], positions)
        return PagedSequence(
            self.pool,
            nodes,
            placed.live_pages,
            capacity,
            names,
            shared,
            positions,
            scale=scale,
        )

    def _reusable(self, request: Request) -> Sequence[LiveKey]:
        prompt = request.prompt
        if not self._reuse_live:
            return ()
        if self._named[0] is not prompt:  # one that waits for room asks again and again
            self._named = prompt, reusable_names(prompt, self.pool.page_size, request.scale)
        return self._named[1]

    def distrust(self, started: Started) -> None:
        """Something came out wrong: no live text that it was made of serves other requests."""
        for name in started.placed.live_names:
            self.pool.drop(name)
        if isinstance(started.sequence, PagedSequence):
            started.sequence.distrust()

    def end(self, started: Started) -> None:
        """Give everything back that a request held."""
        if isinstance(started.sequence, PagedSequence):
            started.sequence.release()
        self._placer.leave(started.placed)

    def place(self, until: float) -> bool:
        """See `NodePlacer.place`."""
        return self._placer.place(until)

    @property
    def must_compute(self) -> bool:
        """See `NodePlacer.must_compute`."""
        return self._placer.must_compute

    def compute_next(self) -> bool:
        """See `NodePlacer.compute_next`."""
        return self._placer.compute_next()

    def wait_for_sent(self) -> bool:
        """Wait for a node that is on its way to the device; False when there is none."""
        return self._placer.wait_for_sent()

    def pin(self, started: Started) -> None:
        """Keep a request's nodes in the pool until `unpin`; a pin counts as one more user."""
        for key in started.placed.nodes:
            self.pool.acquire(key)
            self.pool.pin(key)

    def unpin(self, keys: Iterable[NodeKey]) -> None:
        """Take one pin of each node back.

        Raises:
            RequestError: one is not pinned; nothing changed.
        """
        chosen = list(keys)
        for key in chosen:
            if not self.pool.is_pinned(key):
                raise RequestError(f"node {key} is not pinned.")
        for key in chosen:
            self.pool.unpin(key)
            self.pool.leave(key)

    def _begin_materialized(self, request: Request) -> Started:
        origins: dict[NodeKey, Origin] = {}
        raw: dict[NodeKey, StoredKV] = {}
        for node in request.prompt.nodes:
            key = node.run.key
            if key in raw:
                continue
            kept = self._raw.pop(key, None)
            if kept is None:
                raw[key], origins[key] = self._bring(node.run)
            else:
                raw[key], origins[key] = kept, Origin(Tier.DEVICE, kept.nbytes)
        self._raw = dict(list({**self._raw, **raw}.items())[-RAW_NODES:])
        sequence = MaterializedSequence(
            self.model.geometry,
            request.prompt,
            [raw[node.run.key] for node in request.prompt.nodes],
            request.new_tokens,
            self.model.dtype,
            self.model.device,
        )
        return Started(sequence, Placed(), origins)

    def _bring(self, run: NodeRun) -> tuple[StoredKV, Origin]:
        outcome = self._fetcher.load(run)
        if isinstance(outcome, StoredKV):
            return outcome, Origin(Tier.DISK, outcome.nbytes)
        return self._computer.compute(run), Origin(Tier.NONE, 0, reason_of(outcome, run.source))

    @torch.inference_mode()
    def look(
        self, started: Started, prompt: PlacedPrompt, layers: Collection[int]
    ) -> dict[int, Tensor] | None:
        """How much the last rows of a prompt attend to each of its nodes.

        Only the layers up to the last of ``layers`` are run.

        Args:
            started: holds the nodes; ready.
            prompt: over these nodes, with `MAX_ROWS` live tokens at most.
            layers: whose attention is measured.

        Returns:
            By layer fp32 [q_heads, rows, nodes], see `MassStep`; None: no room for the live text.
        """
        live = len(prompt.live_ids)
        pages = self.pool.allocate(live)
        if pages is None:
            return None
        try:
            held = started.placed.nodes
            nodes = [
                SeenNode(held[one.run.key].pages, one.run.used, one.offset, one.first_row)
                for one in prompt.nodes
            ]
            sequence = PagedSequence(self.pool, nodes, pages, live)
            asked = sequence, prompt.live_ids, prompt.live_positions, layers
            if self._leader is not None:
                return self._leader.look(self._paged, *asked)
            return measure(self.model, self._paged, self.pool, *asked)
        finally:
            self.pool.release(pages)

    @torch.inference_mode()
    def launch(self, batch: Sequence[NextTokens]) -> UnderWay:
        """Begin a pass over the next tokens of several requests.

        Args:
            batch: a request stands in it once; one of `Quality.MATERIALIZED` stands alone.
        """
        first = batch[0]
        if isinstance(first.sequence, MaterializedSequence):
            assert first.ids is not None, "its passes do not overlap"
            wanted = range(len(first.ids) - first.wanted, len(first.ids))
            step = first.sequence.step(first.positions)
            launched = EagerLaunched(run(self.model, first.ids, step, wanted))
            return UnderWay(batch, launched, asynchronous=False)
        return UnderWay(batch, self._packed.launch(batch), self._packed.asynchronous)

    @torch.inference_mode()
    def fetch(self, pass_: UnderWay) -> list[Result | None]:
        """What came of a pass; passes are fetched in the order in which they were launched.

        Args:
            pass_: some requests of it may have ended since.

        Returns:
            One a request; None where nothing is wanted.
        """
        results = pass_.results()
        if isinstance(pass_.batch[0].sequence, MaterializedSequence):
            return results
        chosen: dict[RunningSequence, int] = {}
        for one, result in zip(pass_.batch, results, strict=True):
            assert isinstance(one.sequence, PagedSequence), "it lies in the pool"
            if one.sequence.released:
                continue
            ids = (self._chosen[one.sequence],) if one.ids is None else one.ids
            one.sequence.computed(ids, one.positions)
            if isinstance(result, int):
                chosen[one.sequence] = result
        self._chosen = chosen
        return results

    def warm_up(self) -> None:
        """Do what makes later passes faster, where there is something; may take a minute."""
        self._packed.warm_up()
