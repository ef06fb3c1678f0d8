"""The receptive field: which tokens are not computed."""

from __future__ import annotations

import dataclasses

import numpy as np

from lamella.model_executor import receptive_field
from lamella.model_executor.receptive_field import ReceptiveField
from tests.helpers.planted_faults.planting import replaces


@replaces(receptive_field, "_seen")
def first_key_of_a_window_not_computed(original, *args):
    seen = original(*args)
    return seen & np.roll(seen, 1)


@replaces(receptive_field, "_seen")
def what_only_the_first_query_sees_not_computed(original, spec, positions, request_start, queries):
    return original(spec, positions, request_start, queries[1:])


@replaces(ReceptiveField, "needed_tokens")
def pages_that_stay_taken_for_step_pages(original, field, plan):
    return original(field, dataclasses.replace(plan, first_step_slot=0))


@replaces(ReceptiveField, "needed_tokens")
def what_is_sampled_from_not_computed(original, field, plan):
    num_sampled = plan.num_sampled.copy()
    num_sampled[num_sampled.nonzero()[0][:1]] -= 1
    return original(field, dataclasses.replace(plan, num_sampled=num_sampled))
