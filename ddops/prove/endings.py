"""Which tokens end a reply without being seen in its text: asked of the engine once a token, and remembered.

The only place that knows. It says nothing about whether a reply should have ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddops.prove.wire import Unsupported

if TYPE_CHECKING:
    from ddops.prove.client import EngineClient

# Some engines spell markers out when asked for their text, and leave them out of replies.
_MARKER = re.compile(
    r"<\|[^<>]{1,40}\|>|<\uff5c[^<>]{1,40}\uff5c>|</s>|<(?:eos|eot|end_of_turn|end_of_text|endoftext)>|\[e~\[|\[EOS\]"
)


@dataclass(slots=True)
class Endings:
    """Tokens of one engine. Safe to use from several threads: the same question asked twice has one answer."""

    engine: EngineClient
    _known: dict[int, bool] = field(default_factory=dict)

    def unseen(self, token: int) -> bool:
        """Whether a token leaves no text in a reply. Raises Unsupported where the engine has no /detokenize."""
        if token not in self._known:
            text = self.engine.detokenize([token])
            self._known[token] = not text or _MARKER.fullmatch(text.strip()) is not None
        return self._known[token]

    def may_end(self, token: int) -> bool:
        """The same, in doubt for the engine: True where it cannot be asked."""
        try:
            return self.unseen(token)
        except Unsupported:
            return True
