"""Carrying out an ingestion: cut, say the size, encode, and list the passages last."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from lazyrag.cli.index import Index, IndexSettings, check_weights, recorded_versions
from lazyrag.cli.output import bytes_text, duration_text, interactive, plural, say
from lazyrag.cli.plan import ChangedFile, Plan
from lazyrag.errors import StoreError
from lazyrag.types import NodeText

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import BaseNode

    from lazyrag import Engine
    from lazyrag.cli.vectors import Vectors

BATCH_NODES = 64
"""Passages encoded, embedded and listed together: what an interruption may leave unlisted."""
ROW_BYTES = 16_000
"""Roughly what Chroma writes for one passage: text, vector and search index."""
MOST_CHARACTERS = 200_000
"""That are cut into passages at once. Of much longer text a search for the ends of sentences takes
longer than the 5 seconds it is allowed (nltk)."""
SPARE_BYTES = 200_000_000
"""Left free on the disk."""

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Recipe:
    """How the index is made; like `IndexSettings`, before model and embedding are loaded."""

    model: str
    embedding: str
    chunk_size: int
    chunk_overlap: int
    sink: str
    kv_dtype: str

    @property
    def shape(self) -> str:
        """What decides where texts are cut."""
        return f"{self.chunk_size} {self.chunk_overlap}"


@dataclass(slots=True)
class Outcome:
    """What an ingestion did; sizes in bytes, counts of passages (chunks) and of their tokens."""

    read: int = 0
    chunks: int = 0
    tokens: int = 0
    bytes: int = 0
    repaired: int = 0
    removed: int = 0


class Ingestion:
    """One run over one index directory that this process holds for writing."""

    def __init__(
        self, place: Index, settings: IndexSettings | None, recipe: Recipe, device: str
    ) -> None:
        self._place = place
        self._settings = settings
        self._recipe = recipe
        self._device = device

    def run(self, plan: Plan, *, confirm: bool) -> Outcome:
        """Do what ``plan`` says.

        Raises:
            StoreError: the disk cannot hold it; nothing was written.
            typer.Exit: the user said no.
        """
        outcome = Outcome(removed=len(plan.gone))
        if plan.changed:
            with self._engine() as engine:
                self._cut(plan, engine)
                if plan.changed:
                    self._encode(plan, engine, outcome, confirm=confirm)
        elif plan.unchanged:
            self._repair(outcome)
        if self._settings is not None and plan.gone:
            stale = [row for source in plan.gone for row in plan.rows[source].ids]
            self._vectors().remove(stale)
        return outcome

    @contextmanager
    def _engine(self) -> Iterator[Engine]:
        from lazyrag import Engine

        recipe = self._recipe
        say(f"Loading the model {recipe.model} ...")
        with Engine.from_pretrained(
            recipe.model,
            store=self._place.kv_path,
            device=self._device,
            dtype="auto" if self._settings is None else self._settings.compute_dtype,
            kv_dtype=recipe.kv_dtype,
            sink=recipe.sink,
        ) as engine:
            if self._settings is not None:
                check_weights(self._place, self._settings, engine.weights_digest)
            yield engine

    def _vectors(self) -> Vectors:
        from lazyrag.cli.vectors import Vectors

        return Vectors(self._place.chroma_path)

    def _cut(self, plan: Plan, engine: Engine) -> None:
        from llama_index.core.node_parser import SentenceSplitter

        from lazyrag.cli.vectors import make_nodes

        size = self._recipe.chunk_size
        splitter = SentenceSplitter(
            chunk_size=size,
            chunk_overlap=self._recipe.chunk_overlap,
            tokenizer=lambda text: range(engine.count_tokens(text)),
        )
        for changed in list(plan.changed):
            name = f"file_name: {changed.file.file_name}\n\n"
            if engine.count_tokens(name) > size // 2:
                plan.skip(
                    changed, f"its name alone takes more than half of a passage of {size} tokens"
                )
                continue
            texts = [
                text
                for part in parts_of(changed.text)
                for text in splitter.split_text_metadata_aware(part, name)
            ]
            changed.nodes = make_nodes(
                changed.file.source, changed.file.file_name, changed.digest, texts
            )

    def _encode(self, plan: Plan, engine: Engine, outcome: Outcome, *, confirm: bool) -> None:
        texts = [text for changed in plan.changed for text in _texts(changed.nodes)]
        estimate = engine.estimate(texts)
        needed = estimate.bytes + ROW_BYTES * len(texts)
        known = (
            f" ({estimate.already_stored:,} stored already, or the same as another)"
            if estimate.already_stored
            else ""
        )
        time = "" if estimate.seconds is None else f", about {duration_text(estimate.seconds)}"
        say(
            f"{plural(len(plan.changed), 'file')} in {plural(len(texts), 'passage')}{known}: "
            f"{plural(estimate.tokens, 'token')} to compute, {bytes_text(needed)} to write{time}."
        )
        self._check_space(needed)
        if confirm and interactive() and not typer.confirm("Start?", default=True, err=True):
            say("Nothing was written.")
            raise typer.Exit(1)
        embedding = self._load_embedding()
        if self._settings is None:
            self._settings = self._found(engine, embedding)
        vectors = self._vectors()
        before = engine.store.stats().bytes
        with _progress_bar(estimate.tokens) as advance:
            for batch in _batches(plan.changed):
                self._encode_batch(batch, plan, engine, embedding, vectors, advance)
                outcome.read += len(batch)
        if engine.calibration is None:
            _calibrate(engine)
        outcome.chunks = len(texts)
        outcome.tokens = estimate.tokens
        outcome.bytes = engine.store.stats().bytes - before

    def _encode_batch(
        self,
        batch: list[ChangedFile],
        plan: Plan,
        engine: Engine,
        embedding: BaseEmbedding,
        vectors: Vectors,
        advance: Progress,
    ) -> None:
        """KV first, rows last: what is listed in Chroma is complete."""
        from llama_index.core.schema import MetadataMode

        nodes = [node for changed in batch for node in changed.nodes]
        engine.precompute(_texts(nodes), progress=advance)
        embeddings = embedding.get_text_embedding_batch(
            [node.get_content(MetadataMode.EMBED) for node in nodes]
        )
        fresh = {node.node_id for node in nodes}
        old = [plan.rows[c.file.source].ids for c in batch if c.file.source in plan.rows]
        vectors.replace(nodes, embeddings, [row for ids in old for row in ids if row not in fresh])

    def _repair(self, outcome: Outcome) -> None:
        """Rows without KV (the store was deleted, say) get theirs back."""
        from lazyrag.store import KVStore

        vectors = self._vectors()
        nodes = list(vectors.nodes())
        store = KVStore.open(self._place.kv_path)
        stored = store.stats().nodes
        store.close()
        missing = _texts(nodes)
        if stored >= len({text.text for text in missing}):
            return
        say("The KV store holds fewer passages than the index; computing what is missing.")
        with self._engine() as engine:
            estimate = engine.estimate(missing)
            self._check_space(estimate.bytes)
            with _progress_bar(estimate.tokens) as advance:
                engine.precompute(missing, progress=advance)
            outcome.repaired = estimate.texts - estimate.already_stored
            outcome.tokens = estimate.tokens
            outcome.bytes = estimate.bytes

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self._place.path).free
        if free < needed + SPARE_BYTES:
            raise StoreError(
                f"this needs {bytes_text(needed)} and {bytes_text(SPARE_BYTES)} to spare in "
                f"{self._place.path}, where {bytes_text(free)} are free; nothing was written. Free "
                "some space, give --index another disk, or ingest less."
            )

    def _load_embedding(self) -> BaseEmbedding:
        from lazyrag.cli.vectors import load_embedding

        dim = None if self._settings is None else self._settings.embedding_dim
        return load_embedding(self._recipe.embedding, dim)

    def _found(self, engine: Engine, embedding: BaseEmbedding) -> IndexSettings:
        recipe = self._recipe
        settings = IndexSettings(
            model=recipe.model,
            weights_digest=engine.weights_digest,
            embedding=recipe.embedding,
            embedding_dim=len(embedding.get_text_embedding("length")),
            chunk_size=recipe.chunk_size,
            chunk_overlap=recipe.chunk_overlap,
            sink=recipe.sink,
            kv_dtype=recipe.kv_dtype,
            compute_dtype=engine.encoding.compute_dtype,
            versions=recorded_versions(),
        )
        self._place.write_settings(settings)
        return settings


def parts_of(text: str) -> Iterator[str]:
    """A text in parts of at most `MOST_CHARACTERS`; between paragraphs, lines or words if any end
    in the second half of a part. Put together they are the text.
    """
    first = 0
    while len(text) - first > MOST_CHARACTERS:
        least, most = first + MOST_CHARACTERS // 2, first + MOST_CHARACTERS
        ends = (text.rfind(mark, least, most) + len(mark) for mark in ("\n\n", "\n", " "))
        stop = next((end for end in ends if end > least), most)
        yield text[first:stop]
        first = stop
    yield text[first:]


def _calibrate(engine: Engine) -> None:
    """Once per model, as soon as there are passages to do it with; what goes wrong is no loss."""
    from lazyrag.engine.calibrate import NODES

    if engine.store.stats().nodes < NODES:
        return
    say("Looking, once per model, which attention heads find the passages a question needs ...")
    try:
        engine.calibrate()
    except Exception as error:
        reason = str(error).rstrip(".")
        say(f"Not now ({reason}). `lazyrag calibrate` tries again; until then words decide.")


def _texts(nodes: Sequence[BaseNode]) -> list[NodeText]:
    from llama_index.llms.lazyrag import node_texts

    return node_texts(nodes)


def _batches(files: list[ChangedFile]) -> Iterator[list[ChangedFile]]:
    """Whole files, together at least `BATCH_NODES` passages but for the last batch."""
    batch: list[ChangedFile] = []
    for changed in files:
        batch.append(changed)
        if sum(len(other.nodes) for other in batch) >= BATCH_NODES:
            yield batch
            batch = []
    if batch:
        yield batch


@contextmanager
def _progress_bar(tokens: int) -> Iterator[Progress]:
    """A bar on stderr over all ``tokens``, fed by the progress of one batch after the other."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("Computing"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=tokens)
        seen = finished = 0

        def advance(done: int, total: int) -> None:
            nonlocal seen, finished
            if done < seen:
                finished += seen
            seen = done
            bar.update(task, completed=finished + done)

        yield advance
