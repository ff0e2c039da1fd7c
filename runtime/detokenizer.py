"""Tokens to text as they come, equal in sum to decoding them all at once.

A decoder looks at its neighbours: a character may lie across tokens, the first space of a text may
be dropped, a run of byte tokens is valid or not as a whole. So each step decodes a short window and
emits what the new tokens added to it. A window starts where text was emitted last, so never inside
a character or a run of bytes, and always after a token with text of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

# What a decoder gives for bytes that are no character (yet).
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Enough of the prompt for any decoder's rule about what comes first.
CONTEXT_TOKENS = 8


class StreamingDetokenizer:
    """The text of one request, piece by piece.

    Args:
        decode: ids to text, keeping special tokens.
        special_ids: ids without text; they are passed over.
        byte_ids: ids of byte-fallback tokens (``<0x0A>``): a run of them has no text until it ends.
        context: ids before the first token, so that a text that continues them keeps its leading
            space. Without it the pieces sum up to ``decode(tokens)``, with it to the rest of
            ``decode(context + tokens)``.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        special_ids: Collection[int] = (),
        byte_ids: Collection[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._special_ids = special_ids
        self._byte_ids = byte_ids
        self._window: list[int] = []
        self._shown = ""  # the window's beginning that was emitted
        self._fresh = 0  # where the tokens start that were not emitted
        self._take_context(context)

    def push(self, token: int) -> str:
        """Take one token and return the text that is certain now, often the token's own."""
        if token in self._special_ids:
            return ""
        self._window.append(token)
        if token in self._byte_ids:
            return ""
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """Return the text of what was held back; bytes that are no character are replaced."""
        return self._emit(self._decode(self._window)) if self._fresh < len(self._window) else ""

    def _emit(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._shown = text
        emitted = self._window[self._fresh :]
        alone = self._decode(emitted)
        if alone:  # has text of its own, so it can stand at the window's beginning
            self._window, self._shown = emitted, alone
        self._fresh = len(self._window)
        return piece

    def _take_context(self, context: Sequence[int]) -> None:
        window = [token for token in context if token not in self._special_ids][-CONTEXT_TOKENS:]
        while window and window[0] in self._byte_ids:
            del window[0]
        text = self._decode(window) if window else ""
        if text.startswith(REPLACEMENT) or text.endswith(REPLACEMENT):
            return  # cut inside a character: better without it
        if window and window[-1] in self._byte_ids:
            return
        self._window, self._shown, self._fresh = window, text, len(window)
