"""Search for a small set of names that passes a test, with few tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

#: Whether the stage passes its limits with these names in float32.
Ask = Callable[[list[str]], bool]


class Spent(Exception):
    """The questions allowed were used up."""


@dataclass
class Search:
    """Asks at most `runs` questions, each once. `best` is the smallest set seen to pass."""

    ask: Ask
    runs: int
    asked: dict[frozenset[str], bool] = field(default_factory=dict)
    best: list[str] | None = None

    def passes(self, names: Sequence[str]) -> bool:
        key = frozenset(names)
        if key not in self.asked:
            if len(self.asked) >= self.runs:
                raise Spent
            self.asked[key] = self.ask(list(names))
        passed = self.asked[key]
        if passed and (self.best is None or len(names) <= len(self.best)):
            self.best = list(names)
        return passed

    def flat(self, order: Sequence[str]) -> bool:
        """Search among `order`, the likeliest first. Whether what is in `best` then is known to be minimal."""
        try:
            if not self.passes(order):
                return False
            # Twice as many each time: what matters stands first.
            count = 1
            while count < len(order) and not self.passes(order[:count]):
                count *= 2
            self.best = self._needed([], False, list(order[:count]))
        except Spent:
            return False
        return True

    def tree(self, children: Mapping[str, Sequence[str]]) -> bool:
        """Search among modules: from the outermost inwards, as long as a module's children do in its place."""
        try:
            if not self.passes(children[""]):
                return False
            kept = self._needed([], False, list(children[""]))
            waiting = list(kept)
            while waiting:
                name = waiting.pop(0)
                rest = [other for other in kept if other != name]
                inner = list(children.get(name, ()))
                if not inner or not self.passes([*rest, *inner]):
                    continue
                found = self._needed(rest, False, inner)
                kept = [*rest, *found]
                waiting += found
                # A module and all that stands for it are the same to the limits; fewer computations are kept.
                self.best = kept
            self.best = kept
        except Spent:
            return False
        return True

    def _needed(self, given: list[str], changed: bool, names: list[str]) -> list[str]:
        """The names without which `given` and the others fail (QuickXplain, Junker 2004): earlier ones are preferred."""
        if changed and self.passes(given):
            return []
        if len(names) == 1:
            return names
        middle = len(names) // 2
        first, second = names[:middle], names[middle:]
        late = self._needed([*given, *first], True, second)
        early = self._needed([*given, *late], bool(late), first)
        return [*early, *late]
