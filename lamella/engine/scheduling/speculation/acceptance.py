"""How likely a draft is to be right, from how earlier ones fared: the longer the match, the likelier."""

from __future__ import annotations

# Matches of 1, 2-3, 4-7, 8-15, 16-31 tokens, and of more, are counted apart.
NUM_CLASSES = 6
# What is assumed before anything has been seen, as if of so many drafts. It is soon outweighed.
_ASSUMED = (0.4, 0.5, 0.65, 0.75, 0.85, 0.9)
_ASSUMED_WEIGHT = 4.0
# What all requests of an engine have seen counts for one of them as so many drafts of its own.
_OTHERS_WEIGHT = 6.0
# Observations count half after so many newer ones of their class, so that a text that changes is noticed.
_HALF_LIFE = 16.0
_HALF_LIFE_OF_ALL = 128.0


def class_of(num_matched: int) -> int:
    """The class of a match of at least one token."""
    return min(num_matched.bit_length(), NUM_CLASSES) - 1


class AcceptanceRecord:
    """Of one request, or with `others` None of all."""

    def __init__(self, others: AcceptanceRecord | None = None) -> None:
        self._others = others
        self._decay = 0.5 ** (1 / (_HALF_LIFE_OF_ALL if others is None else _HALF_LIFE))
        self._num_tried = [0.0] * NUM_CLASSES
        self._num_right = [0.0] * NUM_CLASSES

    def note(self, num_matched: int, *, is_right: bool) -> None:
        """A draft that was found behind a match of so many tokens, or behind drafts that were right after one, was or
        would have been right or wrong."""
        index = class_of(num_matched)
        self._num_tried[index] = self._decay * self._num_tried[index] + 1
        self._num_right[index] = self._decay * self._num_right[index] + is_right
        if self._others is not None:
            self._others.note(num_matched, is_right=is_right)

    def probability(self, index: int) -> float:
        """That the next draft of this class is right."""
        if self._others is None:
            before, weight = _ASSUMED[index], _ASSUMED_WEIGHT
        else:
            before, weight = self._others.probability(index), _OTHERS_WEIGHT
        return (self._num_right[index] + weight * before) / (self._num_tried[index] + weight)

    def chances(self, num_matched: int, most: int, least: float) -> list[float]:
        """For each of up to `most` drafts behind a match, that it and all before it are right; only those that are at
        least as likely as `least`."""
        chances: list[float] = []
        chance, index, of_class = 1.0, -1, 0.0
        for length in range(num_matched, num_matched + most):
            if class_of(length) != index:
                index = class_of(length)
                of_class = self.probability(index)
            chance *= of_class
            if chance < least:
                break
            chances.append(chance)
        return chances
