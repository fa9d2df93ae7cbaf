"""The engine: ingestion and generation over one model and one store."""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lazyrag.engine import doctor, scaling
from lazyrag.engine.answer import Task
from lazyrag.engine.calibrate import asked, calibrate, riddles, short_enough
from lazyrag.engine.calls import Calls, in_call
from lazyrag.engine.climb import Ladder
from lazyrag.engine.compute import NodeComputer
from lazyrag.engine.constraint import JsonConstraints
from lazyrag.engine.costs import Costs
from lazyrag.engine.encode import Encoder
from lazyrag.engine.fetch import Fetcher
from lazyrag.engine.fill import PageFiller
from lazyrag.engine.generation import (
    Deliver,
    Delivery,
    Generation,
    GenerationStream,
    Looked,
    Scores,
)
from lazyrag.engine.host import HostTier
from lazyrag.engine.ingest import IngestEstimate, Ingestor, kept_texts
from lazyrag.engine.library import Library
from lazyrag.engine.live import LiveKey
from lazyrag.engine.metrics import EngineStats, Gauges, Metrics
from lazyrag.engine.nodes import NodePlacer
from lazyrag.engine.parallel.follow import follow
from lazyrag.engine.parallel.lead import Leader, LeadingEncoder
from lazyrag.engine.pool import PageKey, PagePool, page_size_on
from lazyrag.engine.progress import token_bar
from lazyrag.engine.report import Tier
from lazyrag.engine.request import Request
from lazyrag.engine.runner import Runner
from lazyrag.engine.sampling import make_options
from lazyrag.engine.sink import sink_ids
from lazyrag.engine.worker import Worker
from lazyrag.engine.write import Writer
from lazyrag.errors import RequestError
from lazyrag.model.load import LoadedModel, load_model, parse_device, parse_dtype
from lazyrag.prompt.read import PromptReader, ReadPrompt
from lazyrag.prompt.segments import end_live, place
from lazyrag.quality.calibration import Calibration, recall_scales, remember, remember_scales
from lazyrag.quality.scale import Scale
from lazyrag.store import Encoding, KVStore
from lazyrag.types import (
    DEFAULT_QUALITY,
    DEFAULT_SINK,
    GenerationOptions,
    KVDType,
    Live,
    Node,
    NodeKey,
    NodeText,
    Prompt,
    Quality,
    Reference,
    Segment,
)

POOL_BYTES = 4 * 2**30
"""Most bytes the pool takes unless told otherwise (and at most a quarter of the memory)."""
CALIBRATION_TEXTS = 512
"""Ingested texts that calibration draws from, at most."""
HOST_BYTES, HOST_SHARE = 64 * 2**30, 4
"""Beside a GPU at most so much of the host's memory, and one part in so many of it, keeps nodes."""
STORING_BYTES, STORING_SHARE = 2**30, 16
"""KV that waits to be stored and that host memory does not hold takes at most the larger of so much
and one part in so many of the memory: seconds of computing ahead of a disk."""
POOL_WINDOWS = 8
"""The pool holds at most this many full context windows unless told otherwise."""

logger = logging.getLogger("lazyrag")


class Engine:
    """Answers prompts over ingested nodes without reading the nodes again.

    One engine holds one model and one store and may be used from several threads; what is asked at
    the same time is computed together. Make one with `from_pretrained`, or with `shared` to use the
    same engine wherever model, store and settings are the same in this process.
    """

    _shared: ClassVar[WeakValueDictionary[tuple[Any, ...], Engine]] = WeakValueDictionary()
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()
    _loading: ClassVar[dict[tuple[Any, ...], threading.Lock]] = {}

    def __init__(
        self,
        model: LoadedModel,
        *,
        store: str | os.PathLike[str] | None = None,
        kv_dtype: KVDType | str = KVDType.MODEL,
        sink: str = DEFAULT_SINK,
        pool_bytes: int | None = None,
        idle_bytes: int | None = None,
        host_bytes: int | None = None,
        reuse_live: bool = True,
        tenant: str = "",
    ) -> None:
        self._model = model
        self.sink = sink
        self.encoding = _encoding(model, sink, kv_dtype, tenant)
        geometry = model.geometry
        longest_node = geometry.max_positions - len(self.encoding.sink)
        if longest_node < 1:
            raise RequestError(
                f"the sink has {len(self.encoding.sink):,} tokens, the context window of "
                f"{model.name!r} is {geometry.max_positions:,}: nothing is left for a node."
            )
        kv = getattr(torch, self.encoding.dtype.value)
        calls = self._calls = Calls()
        metrics = self._metrics = Metrics()
        costs = self._costs = Costs(metrics)
        host = self._host = HostTier(
            _host_bytes(model, host_bytes),
            device=model.device if model.device.type == "cuda" else None,
            evicted=partial(metrics.evicted, Tier.HOST, 1),
        )
        page_size = page_size_on(model.device)
        self._pool = PagePool(
            geometry,
            pages=_pool_pages(model, pool_bytes),
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
            idle_pages=_idle_pages(model, page_size, idle_bytes),
            bring_s=self._bring_s,
            evicted=self._evicted,
        )
        self._temporary = tempfile.TemporaryDirectory(prefix="lazyrag-") if store is None else None
        self.store = KVStore.open(self._temporary.name if self._temporary else store or "")
        digest = self.encoding.digest
        self._closed = False
        library = self._library = Library(self.store, digest, model.tokenizer, longest_node)
        self._reader = PromptReader(
            model.tokenizer,
            library,
            vocabulary=model.model.config.vocab_size,
            longest_node=longest_node,
        )
        nodes_sink = self.encoding.sink
        leader = None if model.ranks is None else Leader(model, self._pool, nodes_sink, kv)
        self._leader = leader
        self._fill = PageFiller(self._pool, geometry).fill if leader is None else leader.fill
        encoder = (Encoder if leader is None else LeadingEncoder)(model, nodes_sink, kv, costs)
        fetcher = self._fetcher = Fetcher(self.store, host, costs, self.kv_bytes_per_token)
        writer = self._writer = Writer(host, _storing_bytes(), metrics)
        computer = NodeComputer(self.store, digest, encoder, library, writer, costs)
        placer = self._make_placer(fetcher, computer)
        self._ladder = Ladder(model, digest)
        self._scaled = model.device.type != "cuda" or bool(self._ladder.scales)
        self._runner = Runner(
            model,
            self._pool,
            placer,
            fetcher,
            computer,
            reuse_live=reuse_live,
            leader=leader,
            scaled=self._scaled,
        )
        self._worker = Worker(self._runner, metrics, calls)
        fetcher.notify = self._worker.node_arrived
        self._ingestor = Ingestor(
            self.store,
            digest,
            library,
            encoder,
            geometry.all_heads,
            kv,
            longest_node,
            self._worker.call,
            calls,
        )
        self._constraints = JsonConstraints(model)

    def _make_placer(self, fetcher: Fetcher, computer: NodeComputer) -> NodePlacer:
        """What brings nodes into the pool; the benchmarks have others."""
        geometry = self._model.geometry
        return NodePlacer(self._pool, geometry, self._fill, fetcher, computer, self._costs)

    def _evicted(self, key: PageKey, pages: int) -> None:
        """An entry leaves the pool for want of room."""
        pool, model = self._pool, self._model
        nbytes = pages * pool.page_size * model.geometry.kv_bytes_per_token(model.dtype)
        self._metrics.evicted(Tier.DEVICE, isinstance(key, NodeKey), nbytes)

    def _bring_s(self, key: PageKey, tokens: int) -> float:
        """Seconds to bring an entry of the pool back once it is gone."""
        if isinstance(key, LiveKey):
            return self._costs.encode.seconds(tokens)
        nbytes = tokens * self.kv_bytes_per_token
        return self._costs.bring_s(tokens, nbytes, key in self._host)

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: KVDType | str = KVDType.MODEL,
        sink: str = DEFAULT_SINK,
        pool_bytes: int | None = None,
        idle_bytes: int | None = None,
        host_bytes: int | None = None,
        reuse_live: bool = True,
        tenant: str = "",
        tensor_parallel: bool = False,
    ) -> Engine:
        """Load a model and open a store.

        Args:
            model: a hub id, a local folder, a ``.gguf`` file, or ``smollm2``.
            store: folder of the KV store; None = a temporary one, removed on `close`.
            device: ``auto``, ``cpu``, ``cuda``, ...
            dtype: compute dtype; ``auto`` is float32 on the CPU and bfloat16 on a GPU.
            kv_dtype: how K and V are kept on disk.
            sink: what nodes are encoded behind: ``passages`` (a neutral system message,
                "Documents:" and neutral passages), ``documents`` (the same without passages),
                ``template`` (the chat template's own opening), ``none``, or a text of your own.
            pool_bytes: device memory for KV in use and for idle nodes; None = chosen from the
                machine.
            idle_bytes: of it, at most so much keeps KV that no running request uses; None = all.
            host_bytes: host memory for nodes beside the device's; None = chosen from the machine
                with a GPU, none without.
            reuse_live: whether live text is reused when everything before it is the same: a
                repeated system text, an unchanged chat history.
            tenant: nodes of one tenant are never served to another.
            tensor_parallel: share the model among the processes that ``torchrun`` has started, one
                a GPU (or on the CPU). Rank 0 gets the engine; in the others this call serves it
                and, once it is closed, ends the program with `SystemExit`.

        The first use of a checkpoint runs a self-check of a second or two: attention over placed
        nodes must equal the model's own.

        Raises:
            ModelError: the model cannot be loaded, is not supported or fails the self-check; with
                ``tensor_parallel`` also that the program was not started with torchrun, or that
                its heads cannot be shared among so many processes.
            StoreError: the store cannot be opened.
        """
        loaded = load_model(
            os.fspath(model), device=device, dtype=dtype, tensor_parallel=tensor_parallel
        )
        ranks = loaded.ranks
        try:
            doctor.check(loaded)
            if ranks is not None and not ranks.leads:
                follow(loaded)
                raise SystemExit(0)
            if ranks is not None:
                ranks.serve()
            return cls(
                loaded,
                store=store,
                kv_dtype=kv_dtype,
                sink=sink,
                pool_bytes=pool_bytes,
                idle_bytes=idle_bytes,
                host_bytes=host_bytes,
                reuse_live=reuse_live,
                tenant=tenant,
            )
        except Exception:
            if ranks is not None:
                ranks.close()
            raise

    @classmethod
    def shared(
        cls,
        model: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> Engine:
        """As `from_pretrained`, but one engine per model, store and settings in this process.

        Without a store there is nothing to share, and a fresh engine is made. Sizes of memory,
        ``reuse_live`` and ``tensor_parallel`` tell no engines apart: the first one's stay.
        """
        if store is None:
            return cls.from_pretrained(model, **settings)
        key = _shared_key(model, store, settings)
        with cls._shared_lock:
            loading = cls._loading.setdefault(key, threading.Lock())
        with loading:  # of two callers one loads; callers for other engines do not wait
            engine = cls._shared.get(key)
            if engine is None or engine._closed:
                engine = cls.from_pretrained(model, store=store, **settings)
                cls._shared[key] = engine
            return engine

    def share(self) -> None:
        """Let `shared` find this engine under its model, store and settings.

        An open engine that is found there already stays.
        """
        settings = {
            "device": self.device,
            "dtype": self.encoding.compute_dtype,
            "kv_dtype": self.encoding.dtype,
            "sink": self.sink,
            "tenant": self.encoding.tenant,
        }
        key = _shared_key(self.model_name, self.store.path, settings)
        with self._shared_lock:
            known = self._shared.get(key)
            if known is None or known._closed:
                self._shared[key] = self

    # what it is

    @property
    def model_name(self) -> str:
        """What the model was asked for as."""
        return self._model.name

    @property
    def model_note(self) -> str | None:
        """A sentence to repeat wherever quality is reported, or None."""
        return self._model.note

    @property
    def device(self) -> str:
        """Where it computes: ``cpu``, ``cuda:0``, ..."""
        return str(self._model.device)

    @property
    def weights_digest(self) -> str:
        """Hex digest of weights and configuration."""
        return self._model.weights_digest

    @property
    def context_window(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._model.geometry.max_positions

    @property
    def has_chat_template(self) -> bool:
        return self._model.tokenizer.chat_template is not None

    @property
    def kv_bytes_per_token(self) -> int:
        """On disk: 2 x layers x kv_heads x head_dim x bytes."""
        return self._model.geometry.all_heads.kv_bytes_per_token(
            getattr(torch, self.encoding.dtype.value)
        )

    @in_call
    def count_tokens(self, text: str) -> int:
        """Tokens of a text as a node or as live text."""
        return len(self._model.tokenizer.encode_text(text))

    @in_call
    def text_ids(self, text: str) -> list[int]:
        """The ids of a text as a node or as live text."""
        return list(self._model.tokenizer.encode_text(text))

    @in_call
    def token_ids(self, prompt: Prompt | Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a prompt as this engine reads it (invariant 4: segment by segment)."""
        runs = self._read(prompt).runs
        return [id for run in runs for id in run.ids]

    @in_call
    def key_of(self, text: str) -> NodeKey:
        """The key of a text as a node, whether or not it is stored.

        Raises:
            StoreError: the index cannot be read.
        """
        return self._library.identify(text).key

    # ingestion

    @in_call
    def estimate(self, texts: Iterable[str | NodeText]) -> IngestEstimate:
        """Tokens, bytes and seconds that `precompute` would take; writes nothing."""
        self._check_open()
        return self._ingestor.estimate(texts)

    @in_call
    def precompute(
        self,
        texts: Iterable[str | NodeText],
        *,
        progress: Callable[[int, int], None] | bool = False,
    ) -> list[NodeKey]:
        """Compute and store the KV of every text that is not stored yet, and register all.

        A text is registered for the reference of its `NodeText`, in addition to those it has; a
        text that was ever registered without one is kept for good. Texts are read as a stream and
        memory stays bounded. Interrupted, it leaves complete nodes only; the same call again does
        the rest.

        Args:
            texts: in the exact form in which they will reach the model.
            progress: called with (tokens done, tokens in all; 0 = not known), or True for a bar on
                stderr.

        Returns:
            One key a text, in order; equal texts have equal keys.

        Raises:
            RequestError: a text is empty or longer than the context window, or its reference has
                no owner or no name; names which.
            StoreError: the disk cannot hold it.
        """
        self._check_open()
        if callable(progress) or not progress:
            keys = self._ingestor.precompute(texts, progress or None)
        else:
            with token_bar("encoding") as bar:
                keys = self._ingestor.precompute(texts, bar)
        return keys

    @in_call
    def register(self, texts: Iterable[str | NodeText]) -> int:
        """Make texts findable that are encoded and stored when a prompt first holds them.

        What is registered already stays as it is and gets no other reference. Texts that cannot be
        a node (empty, longer than the context window, no valid Unicode) are passed over.

        Returns:
            How many texts, aliases among them, were not registered before.

        Raises:
            RequestError: a reference has no owner or no name; names which.
            StoreError: the store's index cannot be read or written.
        """
        self._check_open()
        return self._ingestor.register(texts)

    @in_call
    def release(self, references: Iterable[Reference], keep: Iterable[str | NodeText] = ()) -> int:
        """Drop references, and the texts and nodes of this engine that nobody refers to any more.

        The KV of such a node is deleted from the store, and from memory when no running request
        uses it. Texts that were registered without a reference are never dropped.

        Args:
            references: those to drop; unknown ones are ignored.
            keep: for each of these whose reference is among ``references``, the reference stays on
                the text and its aliases: what a changed document still consists of.

        Returns:
            How many nodes were deleted.

        Raises:
            RequestError: a reference has no owner or no name.
            StoreError: the store's index cannot be written; nothing was dropped.
        """
        self._check_open()
        kept = kept_texts(references, keep)

        def drop() -> int:  # no request is between finding a node in the store and using it
            released = self._library.release(kept)
            self._runner.drop(released.keys)  # one that is not stored may be in memory
            return len(released.nodes)

        return self._worker.call(drop)

    # memory

    @in_call
    def pin(self, nodes: Iterable[str | NodeKey]) -> None:
        """Bring nodes into the pool and keep them there until `unpin`; pins are counted.

        Pinned nodes are part of no budget for idle ones; what they take is there for no other.

        Args:
            nodes: texts in the exact form in which they reach the model, or keys.

        Raises:
            RequestError: a key is not known, a text cannot be a node, or the pool has not enough
                room beside what is pinned; nothing was pinned. When it is only running requests
                that leave no room, the call waits in line.
        """
        self._check_open()
        if isinstance(nodes, str):
            raise RequestError("nodes must be a list of texts or keys, not one string.")
        segments = [Node(text=one) if isinstance(one, str) else Node(key=one) for one in nodes]
        if segments:
            read = self._reader.read_segments(segments)
            request = Request.of_nodes(read)
            self._runner.check_fits(request)
            self._wait(partial(self._worker.pin, request))

    @in_call
    def unpin(self, nodes: Iterable[str | NodeKey]) -> None:
        """Take one pin of each back: they are idle nodes like others again.

        Raises:
            RequestError: one is not pinned; nothing changed.
        """
        self._check_open()
        keys = {self.key_of(one) if isinstance(one, str) else one for one in nodes}
        self._worker.call(lambda: self._runner.unpin(keys))

    # quality

    @in_call
    def calibrate(
        self,
        texts: Sequence[str] | None = None,
        *,
        scales: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Calibration:
        """Find out how this checkpoint shows which nodes a question needs; kept for these weights.

        `Quality.BALANCED` and `Quality.BEST` choose nodes by it, beside the words they share with
        the question. Takes seconds and needs no labels; requests are answered meanwhile.

        Args:
            texts: of nodes, computed and stored if they are not yet; None = some of the ingested.
            scales: find out as well whether reused nodes should be attended to more or less
                strongly than the model would (minutes on a CPU); kept for this encoding. On a GPU
                that was served without, the next engine serves with it.
            progress: called with (made-up questions done, questions in all).

        Raises:
            RequestError: too few texts, or nodes of them that do not fit the pool.
            ModelError: it cannot be kept; this engine has it all the same.
        """
        self._check_open()
        chosen = self._library.some_texts(CALIBRATION_TEXTS) if texts is None else list(texts)
        if scales and self._leader is not None:
            raise RequestError(
                "scales are found without tensor_parallel: calibrate in a program of one process."
            )
        found = calibrate(self._model, chosen, self._see, progress=progress)
        self._ladder.calibration = found
        remember(self._model, found)
        if scales:
            self._calibrate_scales(chosen, progress)
        return found

    def _calibrate_scales(
        self, texts: Sequence[str], progress: Callable[[int, int], None] | None
    ) -> None:
        made = riddles(short_enough(texts, self._model), scaling.QUESTIONS, seed=1)
        prompts = [
            end_live(self._reader.read_segments(asked(one, self._model)).runs) for one in made
        ]
        found = scaling.find_scales(
            self._model, self.encoding.sink, self._ladder, prompts, self._worker.call, progress
        )
        remember_scales(self._model, self.encoding.digest, found)
        if self._scaled:
            self._ladder.scales = found

    @property
    def calibration(self) -> Calibration | None:
        """What is known of how this checkpoint shows which nodes a question needs."""
        return self._ladder.calibration

    @property
    def scales(self) -> Mapping[Quality, Scale]:
        """How nodes of this encoding are attended to best, by quality; others as the model has it.

        On a GPU those found by this engine itself are served by the next one.
        """
        return recall_scales(self._model, self.encoding.digest)

    def _see(self, segments: Sequence[Segment]) -> Mapping[int, Tensor]:
        """How much the last rows of a prompt attend to its nodes, in every layer."""
        read = self._reader.read_segments(segments)
        prompt = place(end_live(read.runs))
        request = Request.of_nodes(ReadPrompt([node.run for node in prompt.nodes]))
        self._runner.check_fits(request)
        layers = range(len(self._model.geometry.layers))
        found = self._wait(partial(self._worker.look, request, prompt, layers))
        assert isinstance(found, Looked)
        if found.masses is None:
            raise RequestError("the pool has no room to calibrate now; ask again later.")
        return found.masses

    # generation

    def generate(
        self, prompt: Prompt, options: GenerationOptions | None = None, **overrides: Any
    ) -> Generation:
        """Continue a raw prompt; ingested texts standing in it verbatim are reused.

        Args:
            prompt: a string, or an ordered list of `Live` and `Node` segments taken as they are.
            options: how to decode; ``overrides`` are fields of it.

        Raises:
            RequestError: a bad option, a schema that cannot be served, an empty prompt, or one
                that does not fit.
        """
        return _drain(self.stream(prompt, options, **overrides))

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        options: GenerationOptions | None = None,
        **overrides: Any,
    ) -> Generation:
        """Answer a conversation through the model's chat template.

        Args:
            messages: dicts with ``role`` and ``content``.
            options: how to decode; ``overrides`` are fields of it.

        Raises:
            RequestError: as `generate`; also when the template refuses the messages.
        """
        return _drain(self.stream_chat(messages, options, **overrides))

    def stream(
        self, prompt: Prompt, options: GenerationOptions | None = None, **overrides: Any
    ) -> GenerationStream:
        """As `generate`, piece by piece. Errors of the request are raised here, before any work."""
        return self._start(prompt, options, overrides)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        options: GenerationOptions | None = None,
        **overrides: Any,
    ) -> GenerationStream:
        """As `chat`, piece by piece. Errors of the request are raised here, before any work."""
        if isinstance(messages, str):
            raise RequestError(
                "chat() takes a list of messages with role and content, not a string."
            )
        return self._start(messages, options, overrides)

    @in_call
    def sample(
        self,
        prompt: Prompt | Sequence[Mapping[str, str]],
        n: int,
        options: GenerationOptions | None = None,
        **overrides: Any,
    ) -> list[Generation]:
        """Several answers to one prompt or conversation.

        With ``reuse_live`` the prompt is computed once, but for the last part that fills no page.
        Answer ``i`` is the one that a single request with the seed ``seed + i`` gets, to rounding.

        Args:
            prompt: as for `generate`, or messages as for `chat`.
            n: how many, at least 1.
            options: how to decode; ``overrides`` are fields of it. At temperature 0 all are equal.

        Raises:
            RequestError: as `generate`; or ``n`` is no positive whole number.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise RequestError(f"n must be a whole number of at least 1, not {n!r}.")
        first = self._request(prompt, options, overrides)
        seed = secrets.randbits(32) if first.options.seed is None else int(first.options.seed)
        streams = []
        for number in range(n):
            constraint = first.constraint
            if number and first.options.json_schema is not None:
                constraint = self._constraints.make(first.options.json_schema)
            chosen = replace(first.options, seed=seed + number)
            streams.append(self._stream_of(replace(first, options=chosen, constraint=constraint)))
        try:
            streams[0].wait_for_piece()  # the others find its whole pages computed
            for stream in streams[1:]:
                stream.begin()
            return [stream.read() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def _stream_of(self, request: Request) -> GenerationStream:
        return GenerationStream(partial(self._submit, request))

    @in_call
    def _submit(self, request: Request, deliver: Deliver) -> Task:
        return self._worker.submit(request, deliver)

    def _start(
        self,
        prompt: Prompt | Sequence[Mapping[str, str]],
        options: GenerationOptions | None,
        overrides: Mapping[str, Any],
    ) -> GenerationStream:
        return self._stream_of(self._request(prompt, options, overrides))

    @in_call
    def _request(
        self,
        prompt: Prompt | Sequence[Mapping[str, str]],
        options: GenerationOptions | None,
        overrides: Mapping[str, Any],
    ) -> Request:
        started = time.perf_counter()
        self._check_open()
        if options is not None and not isinstance(options, GenerationOptions):
            raise RequestError("options is a GenerationOptions; give single options by name.")
        chosen = make_options(options, overrides)
        schema = chosen.json_schema
        constraint = None if schema is None else self._constraints.make(schema)
        read = self._read(prompt)
        if chosen.quality is None:
            chosen = replace(chosen, quality=_default_quality(prompt))
        request = Request.from_prompt(read, chosen, constraint, self._model, started)
        request = self._on_rung(request, read)
        self._runner.check_fits(request)
        return request

    def _on_rung(self, request: Request, read: ReadPrompt) -> Request:
        """The request as the ladder has it, or with what it takes to get there."""
        quality = request.options.quality
        request = replace(request, scale=self._ladder.scale(quality))
        climb = self._ladder.climb(end_live(read.runs), quality)
        if climb is None:
            return request
        if climb.heads:
            return replace(request, climb=climb)
        return self._runner.climbed(request, climb)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this engine is closed.")
        if self._model.ranks is not None:
            self._model.ranks.check()

    def _read(self, prompt: Prompt | Sequence[Mapping[str, str]]) -> ReadPrompt:
        if isinstance(prompt, str):
            return self._reader.read_text(prompt)
        parts = prompt if isinstance(prompt, Sequence) else [prompt]
        segments = [part for part in parts if isinstance(part, Live | Node)]
        messages = [part for part in parts if isinstance(part, Mapping)]
        if len(segments) == len(parts):
            return self._reader.read_segments(segments)
        if len(messages) == len(parts):
            return self._reader.read_chat(messages)
        raise RequestError(
            "a prompt is a string, a list of Live and Node segments, or a list of messages "
            "with role and content."
        )

    def score(
        self,
        prompt: Prompt | Sequence[Mapping[str, str]],
        answer: str,
        *,
        quality: Quality | str | None = None,
    ) -> list[float]:
        """Log-probability (natural) of each token of an answer behind a prompt or conversation.

        Args:
            prompt: as for `generate`, or messages as for `chat`.
            answer: the text to score.
            quality: see `GenerationOptions`.

        Raises:
            RequestError: the answer is empty, or prompt and answer do not fit.
        """
        return self._score(prompt, answer, quality, whole=False).log_probabilities

    @in_call
    def _score(
        self,
        prompt: Prompt | Sequence[Mapping[str, str]],
        answer: str,
        quality: Quality | str | None,
        *,
        whole: bool,
    ) -> Scores:
        """As `score`; with ``whole`` the distribution at every token of the answer as well."""
        ids = self._model.tokenizer.encode_text(answer)
        if not ids:
            raise RequestError("the answer to score is empty.")
        return self._score_ids(prompt, ids, quality, whole=whole)

    @in_call
    def _score_ids(
        self,
        prompt: Prompt | Sequence[Mapping[str, str]],
        ids: Sequence[int],
        quality: Quality | str | None,
        *,
        whole: bool,
    ) -> Scores:
        overrides = {"quality": quality, "max_new_tokens": len(ids)}
        request = self._request(prompt, None, overrides)
        outcome = self._wait(partial(self._worker.score, request, ids, whole))
        assert isinstance(outcome, Scores)
        return outcome

    @staticmethod
    def _wait(submit: Callable[[Deliver], Task]) -> Delivery:
        """Put a request in line that delivers nothing but its outcome, and wait for that."""
        outcomes: SimpleQueue[Delivery] = SimpleQueue()
        task = submit(outcomes.put)
        try:
            outcome = outcomes.get()
        except BaseException:
            task.cancelled = True
            raise
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    # life

    @in_call
    def warm_up(self) -> None:
        """Do now what makes later passes faster: on a GPU, compile the model's layers and capture
        passes, which takes up to a minute. Without it passes are captured as they come.
        """
        self._check_open()
        self._worker.call(self._runner.warm_up)

    def stats(self) -> EngineStats:
        """What this engine has done since it was made, and how things stand; from any thread."""
        pool, host = self._pool, self._host
        page_bytes = pool.page_size * self._model.geometry.kv_bytes_per_token(pool.k.dtype)
        waiting, loading, running = self._worker.line
        return self._metrics.snapshot(
            Gauges(
                waiting=waiting,
                loading=loading,
                running=running,
                pool_pages=pool.total_pages,
                pool_free_pages=pool.free_pages,
                idle_bytes=pool.evictable_pages * page_bytes,
                idle_budget_bytes=pool.idle_budget * page_bytes,
                pinned_bytes=pool.pinned_pages * page_bytes,
                resident_nodes=len(pool),
                host_nodes=len(host),
                host_bytes=host.used_bytes,
                host_budget_bytes=host.budget_bytes,
                storing_bytes=self._writer.nbytes,
            )
        )

    @in_call
    def flush(self) -> None:
        """Return once everything that was computed so far is in the store, or could not be stored.

        Answers do not wait for that: computed nodes are stored beside what follows, and a text
        given as a node can be found in prompts from then on. From any thread, at any time.
        """
        self._writer.flush()

    def close(self) -> None:
        """Finish storing, then give the store (and a temporary folder) back.

        The engine cannot be used afterwards.
        """
        self._closed = True
        self._worker.close()
        self._fetcher.close()
        self._writer.close()
        if self._model.ranks is not None:
            self._model.ranks.close()
        self.store.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _default_quality(prompt: Prompt | Sequence[Mapping[str, str]]) -> Quality:
    """Nodes of a list of segments stay where their caller has put them."""
    given = not isinstance(prompt, str) and any(isinstance(one, Live | Node) for one in prompt)
    return Quality.FAST if given else DEFAULT_QUALITY


def _drain(stream: GenerationStream) -> Generation:
    with stream:
        return stream.read()


def _shared_key(
    model: str | os.PathLike[str], store: str | os.PathLike[str], settings: Mapping[str, Any]
) -> tuple[Any, ...]:
    defaults = inspect.signature(Engine.from_pretrained).parameters
    chosen = {name: defaults[name].default for name in defaults} | dict(settings)
    name = os.fspath(model)
    chosen["model"] = str(Path(name).resolve()) if Path(name).exists() else name
    chosen["store"] = str(Path(store).expanduser().resolve())
    chosen["device"] = device = parse_device(chosen["device"])
    chosen["dtype"] = dtype = str(parse_dtype(chosen["dtype"], device)).removeprefix("torch.")
    if chosen["kv_dtype"] == KVDType.MODEL:
        chosen["kv_dtype"] = dtype
    for name in ("pool_bytes", "idle_bytes", "host_bytes", "reuse_live", "tensor_parallel"):
        del chosen[name]
    return tuple(sorted((name, str(value)) for name, value in chosen.items()))


def _encoding(model: LoadedModel, sink: str, kv_dtype: KVDType | str, tenant: str) -> Encoding:
    compute = str(model.dtype).removeprefix("torch.")
    try:
        kept = KVDType(kv_dtype)
    except ValueError:
        raise RequestError(
            f"unknown KV dtype {str(kv_dtype)!r}: use {', '.join(KVDType)}."
        ) from None
    return Encoding(
        weights=model.weights_digest,
        tokenizer=model.tokenizer.digest().hex(),
        rotary=model.geometry.rotary_digest.hex(),
        sink=sink_ids(sink, model.tokenizer),
        dtype=KVDType(compute) if kept is KVDType.MODEL else kept,
        compute_dtype=compute,
        tenant=tenant,
    )


def _idle_pages(model: LoadedModel, page_size: int, idle_bytes: int | None) -> int | None:
    if idle_bytes is None:
        return None
    if idle_bytes < 0:
        raise RequestError(f"idle_bytes must not be negative, not {idle_bytes}.")
    return idle_bytes // (page_size * model.geometry.kv_bytes_per_token(model.dtype))


def _host_bytes(model: LoadedModel, host_bytes: int | None) -> int:
    if host_bytes is not None:
        if host_bytes < 0:
            raise RequestError(f"host_bytes must not be negative, not {host_bytes}.")
        return host_bytes
    if model.device.type != "cuda":  # the pool is host memory already
        return 0
    return min(HOST_BYTES, _memory_bytes() // HOST_SHARE)


def _storing_bytes() -> int:
    return max(STORING_BYTES, _memory_bytes() // STORING_SHARE)


def _memory_bytes() -> int:
    """Of this machine, or what its container leaves of it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups of version 2, and 1
        with suppress(OSError, ValueError):
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(limits)


def _pool_pages(model: LoadedModel, pool_bytes: int | None) -> int:
    page_size = page_size_on(model.device)
    per_page = page_size * model.geometry.kv_bytes_per_token(model.dtype)
    if pool_bytes is not None:
        if pool_bytes < per_page:
            raise RequestError(
                f"pool_bytes={pool_bytes} holds no page: one takes {per_page} bytes."
            )
        return pool_bytes // per_page
    if model.device.type == "cuda":
        memory, _ = torch.cuda.mem_get_info(model.device)
    else:
        memory = _memory_bytes()
    windows = POOL_WINDOWS * model.geometry.max_positions
    return max(1, min(min(POOL_BYTES, memory // 4) // per_page, -(-windows // page_size)))
