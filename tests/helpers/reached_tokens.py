"""What a step must compute, found by following each dependency from what is wanted: the oracle of ReceptiveField."""

from __future__ import annotations

from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.step_plan import StepPlan
from tests.helpers.fake_executor import keys_seen
from tests.helpers.simulation import kind_of


def reached_tokens(
    plan: StepPlan, layout: KVLayout, specs: list[KVCacheSpec], first_step_page: int
) -> tuple[list[set[int]], list[set[int]]]:
    """Per layer the tokens that it must take in, and one set more, those that leave the last; and per layer, those
    whose KV it must write. specs: what each layer sees."""
    num_layers = len(specs)
    slots = [plan.groups[layout.layer_address(layer)[0]].slot_mapping for layer in range(num_layers)]
    taken: list[set[int]] = [set() for _ in range(num_layers + 1)]
    written: list[set[int]] = [set() for _ in range(num_layers)]
    wanted = [
        ("hidden", num_layers, int(stop) - behind)
        for stop, count in zip(plan.query_start[1:], plan.num_sampled.tolist(), strict=True)
        for behind in range(1, count + 1)
    ]
    for layer in range(num_layers):
        if layout.owners[layer] == layer:
            pages = slots[layer] // layout.page_tokens
            wanted += [("kv", layer, token) for token, page in enumerate(pages) if 0 <= page < first_step_page]
    ranges = list(zip(plan.query_start[:-1].tolist(), plan.query_start[1:].tolist(), strict=True))
    request_of = [request for request, (start, stop) in enumerate(ranges) for _ in range(start, stop)]
    while wanted:
        what, layer, token = wanted.pop()
        if what == "kv":
            if token not in written[layer] and slots[layer][token] >= 0:  # else it is in the cache
                written[layer].add(token)
                wanted.append(("hidden", layer, token))
        elif token not in taken[layer]:
            taken[layer].add(token)
            if layer == 0:
                continue
            wanted.append(("hidden", layer - 1, token))
            start, _ = ranges[request_of[token]]
            for key in keys_seen(*kind_of(specs[layer - 1]), int(plan.positions[token])):
                new = start + key - int(plan.positions[start])
                if new >= start:
                    wanted.append(("kv", layout.owners[layer - 1], new))
    return taken, written
