"""Faults to plant, by subject; FAULTS has them all by name."""

from tests.helpers.planted_faults import matching, memory, moves, receptive_field, step_pages, steps
from tests.helpers.planted_faults.planting import FAULTS

__all__ = ["FAULTS", "matching", "memory", "moves", "receptive_field", "step_pages", "steps"]
