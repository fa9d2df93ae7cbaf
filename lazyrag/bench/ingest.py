"""Ingestion speed against the model's plain batched forward, and its memory.

    python -m lazyrag.bench.ingest                  throughput, one run on the same tokens
    python -m lazyrag.bench.ingest --memory FILE    peak memory after 300, 600 and 1,200 passages

FILE is JSON lines with a field ``text``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
import transformers

from lazyrag.bench.corpus import passages, take
from lazyrag.engine.encode import length_batches
from lazyrag.engine.engine import Engine
from lazyrag.model.source import find_model

COUNTS = (300, 600, 1200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-dtype", default="float16")
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=380)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.count is not None:
        _peak(arguments.model, arguments.kv_dtype, arguments.memory, arguments.count)
    elif arguments.memory is not None:
        for count in COUNTS:  # a process each: the peak of a process never falls
            command = [sys.executable, "-m", "lazyrag.bench.ingest", "--count", str(count)]
            options = ["--memory", str(arguments.memory), "--model", arguments.model]
            subprocess.run([*command, *options, "--kv-dtype", arguments.kv_dtype], check=True)
    else:
        _throughput(arguments)


def _throughput(arguments: argparse.Namespace) -> None:
    with Engine.from_pretrained(arguments.model) as engine:
        texts = take(passages(engine, arguments.tokens), arguments.nodes)
        ids = [engine.token_ids(text) for text in texts]
        tokens = sum(map(len, ids))
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        find_model(arguments.model, torch.float32).folder, dtype=torch.float32
    ).eval()
    print(
        f"{len(ids)} nodes, {tokens:,} tokens, KV kept in {arguments.kv_dtype}, "
        f"{torch.get_num_threads()} threads"
    )
    ours, theirs = [], []
    for _ in range(arguments.rounds):
        with (
            tempfile.TemporaryDirectory() as store,
            Engine.from_pretrained(
                arguments.model, store=store, kv_dtype=arguments.kv_dtype
            ) as engine,
        ):
            engine.estimate(texts[:1])  # warm up
            start = time.perf_counter()
            engine.precompute(texts)
            ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        _plain_forward(plain.base_model, ids)
        theirs.append(time.perf_counter() - start)
    ratio = median(theirs) / median(ours)
    print(f"ours (encode, check, write, index)  {tokens / median(ours):8.0f} tokens/s")
    print(f"plain batched forward, no logits    {tokens / median(theirs):8.0f} tokens/s")
    print(
        f"ratio {ratio:.2f} (ours, best of the rounds: {max(theirs) / min(ours):.2f}, "
        f"worst: {min(theirs) / max(ours):.2f})"
    )


@torch.inference_mode()
def _plain_forward(model: torch.nn.Module, ids: list[list[int]]) -> None:
    for batch in length_batches([len(one) for one in ids]):
        longest = max(len(ids[index]) for index in batch)
        padded = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, index in enumerate(batch):
            padded[row, : len(ids[index])] = torch.tensor(ids[index])
            mask[row, : len(ids[index])] = 1
        model(input_ids=padded, attention_mask=mask, use_cache=False)


def _peak(model: str, kv_dtype: str, file: Path, count: int) -> None:
    def texts() -> Iterator[str]:
        with file.open(encoding="utf-8") as lines:
            for _, line in zip(range(count), lines, strict=False):
                yield json.loads(line)["text"]

    with Engine.from_pretrained(model, kv_dtype=kv_dtype) as engine:
        engine.generate("touches every weight once", max_new_tokens=1)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
        loaded = _memory("VmRSS")
        start = time.perf_counter()
        keys = engine.precompute(texts())
        stats = engine.store.stats()
        print(
            f"{len(keys):6,} passages, {stats.tokens:8,} tokens, {stats.bytes / 1e6:8,.0f} MB, "
            f"{time.perf_counter() - start:6.0f} s, "
            f"peak {(_memory('VmHWM') - loaded) / 1e6:6.0f} MB over the loaded model "
            f"({loaded / 1e6:,.0f} MB)",
            flush=True,
        )


def _memory(field: str) -> int:
    """Bytes: ``VmRSS`` is now, ``VmHWM`` the peak (Linux)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
