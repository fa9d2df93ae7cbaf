"""From token ids to text that may be sent out now: whole characters, and never a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lazyrag.errors import RequestError

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 3
"""A character cut short has at most three bytes, shown as one U+FFFD each or all together."""
_PATIENCE = 4
"""A character takes at most four tokens; a U+FFFD undecided for longer is the model's own."""
_CONTEXT = 8
_WINDOW = 2 * _CONTEXT


class TextStream:
    """Turns ids into text, one token at a time, and ends it before the first stop string.

    The text that comes out depends on the ids and the stop strings only, never on how they arrive:
    the deltas of `push` and `finish` joined are `text`, which is ``decode`` of all ids, cut where
    a stop string begins. Of several stop strings the one complete first ends the text; of two
    complete at the same character, the longer.

    Only the last few tokens are decoded at a push. They are decoded together, so a decoder that
    drops the leading space of its first token (SentencePiece) does so at the start of text only.

    Args:
        decode: ids to text, without the tokenizer's clean-up of spaces. Bytes that are no character
            must show as U+FFFD. Byte fallback shows every byte of a run so until the run is whole;
            characters given out stay, also when the run never becomes whole.
        stop: strings that end the text.

    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stop:
            raise RequestError("A stop string is empty: leave it out or give it some text.")
        self._longest_stop = max(map(len, self._stop), default=0)
        self._parts: list[str] = []
        self._held = ""
        self._window: list[int] = []
        self._decoded = ""
        self._given = ""
        self._settled = 0
        self._waited = 0
        self._open = True
        self._stopped = False

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._parts)

    @property
    def stopped(self) -> bool:
        """True once a stop string was found; `text` ends just before it and will not grow."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Add one token.

        Returns:
            Text that is safe to send now; "" while it may be part of a character or a stop string.

        Raises:
            RuntimeError: the text has already ended, by a stop string or by `finish`.
        """
        if not self._open:
            raise RuntimeError("This text has ended: it takes no more tokens.")
        self._window.append(token_id)
        decoded = self._decode(self._window)
        if decoded == self._decoded and not self._decode([token_id, token_id]):
            self._window.pop()  # special or of no meaning: no text anywhere, and no context
        agrees = decoded.startswith(self._given)
        self._waited = self._waited + 1 if decoded == self._decoded or not agrees else 0
        self._decoded = decoded
        if self._waited >= _PATIENCE:
            return self._emit(self._release())
        if not agrees:
            return ""
        given = decoded[: len(decoded) - _pending(decoded)]
        given = max(given, self._given, key=len)
        fresh = given[len(self._given) :]
        self._given = given
        if given == decoded:
            self._settled = len(self._window)
        if len(self._window) >= _WINDOW:
            self._shorten_window()
        return self._emit(fresh)

    def finish(self) -> str:
        """End the text and return what was held back."""
        if not self._open:
            return ""
        delta = self._emit(self._release(), last=True)
        self._open = False
        return delta

    def _release(self) -> str:
        """Give out the undecided characters as they are."""
        if self._decoded.startswith(self._given):
            fresh = self._decoded[len(self._given) :]
        else:
            self._window = self._window[self._settled :]
            fresh = self._decoded = self._decode(self._window)
        self._given = self._decoded
        self._settled = len(self._window)
        self._waited = 0
        return fresh

    def _shorten_window(self) -> None:
        """Forget old tokens, where the rest decodes alone to the end of what all decode to.

        The rest must hold a character already given out: it could otherwise begin inside one.
        """
        pending = len(self._decoded) - len(self._given)
        for start in range(len(self._window) - _CONTEXT, 0, -1):
            tail = self._decode(self._window[start:])
            if len(tail) > pending and self._decoded.endswith(tail):
                del self._window[:start]
                self._decoded = tail
                self._given = tail[: len(tail) - pending]
                self._settled = max(0, self._settled - start)
                return

    def _emit(self, fresh: str, last: bool = False) -> str:
        """Pass ``fresh`` through the stop strings; returns what may go out."""
        text = self._held + fresh
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            keep = min(found)[1]
            self._stopped, self._open = True, False
        else:
            keep = len(text) if last else len(text) - self._stop_begun(text)
        self._held = "" if self._stopped else text[keep:]
        if keep:
            self._parts.append(text[:keep])
        return text[:keep]

    def _stop_begun(self, text: str) -> int:
        """Length of the longest end of ``text`` with which some stop string begins."""
        for length in range(min(self._longest_stop - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def _pending(text: str) -> int:
    """Characters at the end of ``text`` that the next token may still change."""
    return min(_MAX_PENDING, len(text) - len(text.rstrip(_REPLACEMENT)))
