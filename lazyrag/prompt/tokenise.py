"""Text to ids: the template's control tokens are read once, a document's never."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from lazyrag.errors import ModelError


class PromptTokenizer:
    """A tokenizer that keeps what a prompt says apart from what its template commands.

    A piece of a prompt is encoded the same wherever it stands: no special token is added, and no
    space is put before it. ``tokenizer`` must not be given other tokens afterwards.

    Attributes:
        tokenizer: what this was made from.
        bos_ids: what the tokenizer itself puts before a raw prompt; () if nothing.
        control_ids: special and added tokens, also those added as ordinary ones (``<tool_call>``,
            ``</think>``). Added runs of white space and single characters are text, not control.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Derive the two readings, of text and of templates, from ``tokenizer``.

        Raises:
            ModelError: the tokenizer is not backed by the `tokenizers` library.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ModelError(
                f"{tokenizer.name_or_path or type(tokenizer).__name__} has no fast tokenizer "
                "(tokenizer.json), which tells where in a text a token stands. Use a checkpoint "
                "that brings one, or convert it with transformers."
            )
        self.tokenizer = tokenizer
        # Any call of the tokenizer may have left its truncation and padding in the backend.
        layout = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
        self._layout_digest = hashlib.sha256(_canonical(layout)).digest()

        spelling = {
            number: token.content for number, token in backend.get_added_tokens_decoder().items()
        }
        for token in tokenizer.all_special_tokens:
            number = backend.token_to_id(token)
            if number is not None:
                spelling[number] = token
        self.control_ids = frozenset(
            number for number, token in spelling.items() if not _is_text(token)
        )
        self._unknown_id = _unknown_id(layout["model"], backend)

        whole = layout | {"post_processor": None}
        apart = whole | {
            key: _without_leading_space(whole[key]) for key in ("normalizer", "pre_tokenizer")
        }
        kept = [token for token in whole["added_tokens"] if token["id"] not in self.control_ids]
        self._text = _build(apart | {"added_tokens": kept})
        if any(self._text.token_to_id(token["content"]) != token["id"] for token in kept):
            self._text = _build(apart | {"added_tokens": []})
        self._control = _build(apart)
        self._control_opening = _build(whole) if apart != whole else self._control
        self.bos_ids = _opening_ids(tokenizer)

    @property
    def chat_template(self) -> str | None:
        """The template `render_chat` uses, None if the tokenizer has none."""
        return find_chat_template(self.tokenizer)

    def encode_text(self, text: str) -> list[int]:
        """Ids of ``text`` as mere text: whatever it spells, no id of `control_ids` comes out.

        A character the vocabulary lacks gives the unknown token, if the tokenizer has one. A lone
        surrogate is read as U+FFFD.

        Raises:
            ModelError: the tokenizer writes an ordinary character as a control token.
        """
        ids: list[int] = []
        waiting = [_without_surrogates(text)]
        while waiting:
            piece = waiting.pop()
            encoding = self._text.encode(piece, add_special_tokens=False)
            cuts = self._cuts(piece, encoding.ids, encoding.offsets)
            if not cuts:
                ids += encoding.ids
                continue
            bounds = [0, *cuts, len(piece)]
            waiting += reversed([piece[start:stop] for start, stop in pairwise(bounds)])
        return ids

    def encode_control(self, text: str) -> list[int]:
        """Ids of template text: special tokens written in it are read, none is added."""
        text = _without_surrogates(text)
        encoding = self._control.encode(text, add_special_tokens=False)
        if self._control_opening is self._control:
            return list(encoding.ids)
        # What follows a control token may begin with a space piece; what follows a content may not.
        for place, number in enumerate(encoding.ids):
            if number in self.control_ids:
                start = encoding.offsets[place][0]
                rest = self._control_opening.encode(text[start:], add_special_tokens=False)
                head = self._control.encode(text[:start], add_special_tokens=False)
                return [*head.ids, *rest.ids]
        return list(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out, spaces as they are."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def digest(self) -> bytes:
        """32 bytes: all that decides which ids a text or a chat gets."""
        content = [self.chat_template, self.bos_ids, sorted(self.control_ids)]
        return hashlib.sha256(self._layout_digest + _canonical(content)).digest()

    def _cuts(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """Where to cut ``text`` so that its control tokens fall apart; empty if it has none."""
        cuts = []
        for number, (start, stop) in zip(ids, offsets, strict=True):
            if number not in self.control_ids:
                continue
            spelling = self._text.id_to_token(number) or ""
            if number == self._unknown_id and spelling not in text[start:stop]:
                continue
            if stop - start < 2:
                raise ModelError(
                    f"the tokenizer of {self.tokenizer.name_or_path or 'this model'} writes the "
                    f"character {text[start:stop]!r} as its control token "
                    f"{spelling!r}; such a tokenizer is not supported."
                )
            cuts.append((start + stop) // 2)
        return cuts


def find_chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's (default) chat template, None if it has none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError:  # several named ones, none of them the default
        return None
    return template


def _is_text(token: str) -> bool:
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return len(token) < 2 or not token.strip(" \t\r\n▁") or is_byte


def _unknown_id(model: dict[str, Any], backend: Tokenizer) -> int | None:
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    token = model.get("unk_token")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _without_leading_space(part: Any) -> Any:
    """A normaliser or pre-tokenizer that does not put a space before the text."""
    if not isinstance(part, dict):
        return part
    kind = part["type"]
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        return part | {"prepend_scheme": "never"}
    if kind == "ByteLevel" and "add_prefix_space" in part:
        return part | {"add_prefix_space": False}
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            changed = [_without_leading_space(inner) for inner in part[key]]
            return part | {key: [inner for inner in changed if inner is not None]}
    return part


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _build(layout: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(layout))


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _opening_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()
