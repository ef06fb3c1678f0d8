"""The processes of several engines that share requests: started, asked, watched and started again.

Knows what each was given and has not answered; not what requests are, nor who should get one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lamella.distributed.ray_cluster import connect
from lamella.distributed.replica import QueuedRequest, Replica, ReplicaState
from lamella.engine.outputs import RequestOutput
from lamella.errors import ConfigError, LamellaError, ReplicaLostError

logger = logging.getLogger(__name__)

MOST_DEATHS = 3  # of a replica with nothing answered between them
_LOAD_SECONDS = 600.0
_PLACE_SECONDS = 120.0
_RUN_SECONDS = 0.5
_OPTIONS = ("num_cpus", "num_gpus", "memory", "resources")


class Answer(NamedTuple):
    """What became of a call. outputs: None where the replica was lost, and with it all that it had not answered."""

    replica: int
    outputs: list[RequestOutput] | None


class Replicas(Protocol):
    """What a `ReplicatedEngine` needs of its engines' processes: see ReplicaSet."""

    max_model_len: int
    num_restarts: int

    @property
    def is_closed(self) -> bool: ...

    def is_ready(self, index: int) -> bool: ...

    def is_lost(self, index: int) -> bool: ...

    def run(self, index: int, added: list[QueuedRequest], aborted: list[str]) -> None: ...

    def wait(self, seconds: float) -> list[Answer]: ...

    def each(self, ask: Callable[[Any], Any], seconds: float) -> Sequence[Any]: ...

    def close(self) -> None: ...


class _Slot:
    """A replica's place, whoever is in it."""

    def __init__(self) -> None:
        self.actor: Any = None
        self.call: Any = None  # the call that has not returned: one at a time
        self.is_starting = True
        self.deadline = 0.0
        self.num_deaths = 0


class ReplicaSet:
    """num_replicas engines of the same arguments, as Ray actors in one placement group.

    Raises ConfigError where Ray has not the resources, and what an engine raises that cannot be made at first.
    """

    def __init__(
        self, num_replicas: int, arguments: dict[str, Any], options: Mapping[str, Any], *, answer_seconds: float
    ) -> None:
        """options: what Ray is told of each. answer_seconds: a replica that is silent for so long beyond its turn is
        taken for one that hangs."""
        self._arguments = arguments
        self._answer_seconds = answer_seconds
        self._ray = connect()
        self._options = {"num_cpus": 1, **options}
        self._slots = [_Slot() for _ in range(num_replicas)]
        self._group = self._placed(num_replicas)
        self.num_restarts = 0
        try:
            for index in range(num_replicas):
                self._start(index)
            states = [self._first_state(slot) for slot in self._slots]
        except BaseException:
            self.close()
            raise
        self.max_model_len = min(state.max_model_len for state in states)

    @property
    def is_closed(self) -> bool:
        return self._group is None

    def is_ready(self, index: int) -> bool:
        """Whether `run` may be called."""
        slot = self._slots[index]
        return slot.call is None and not slot.is_starting

    def is_lost(self, index: int) -> bool:
        """Whether it is being started again."""
        return self._slots[index].is_starting

    def run(self, index: int, added: list[QueuedRequest], aborted: list[str]) -> None:
        slot = self._slots[index]
        slot.call = slot.actor.run.remote(added, aborted, _RUN_SECONDS)
        slot.deadline = time.monotonic() + _RUN_SECONDS + self._answer_seconds

    def wait(self, seconds: float) -> list[Answer]:
        """Answers that are there, after waiting so long for the first. Raises ReplicaLostError where a replica has
        ended MOST_DEATHS times with nothing answered between."""
        calls = {slot.call: index for index, slot in enumerate(self._slots) if slot.call is not None}
        done, _ = self._ray.wait(list(calls), num_returns=1, timeout=seconds) if calls else ([], [])
        if done:  # others may be there as well
            done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        answers = [answer for call in done if (answer := self._answered(calls[call])) is not None]
        now = time.monotonic()
        for index, slot in enumerate(self._slots):
            if slot.call is not None and slot.call not in done and now > slot.deadline:
                answers.append(self._lost(index, f"it has not answered for {self._answer_seconds:.0f} s"))
        return answers

    def _answered(self, index: int) -> Answer | None:
        slot = self._slots[index]
        call, slot.call = slot.call, None
        was_starting, slot.is_starting = slot.is_starting, False
        try:
            found = self._ray.get(call)
        except Exception as error:  # whatever ended it, or its engine
            return self._lost(index, _cause(error))
        if was_starting:
            return None
        if found:
            slot.num_deaths = 0
        return Answer(index, found)

    def _lost(self, index: int, cause: BaseException | str) -> Answer:
        slot = self._slots[index]
        slot.num_deaths += 1
        with contextlib.suppress(Exception):  # it may be gone
            self._ray.kill(slot.actor, no_restart=True)
        told = f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else cause
        if slot.num_deaths >= MOST_DEATHS:
            self.close()
            error = ReplicaLostError(
                f"replica {index} of {len(self._slots)} ended {slot.num_deaths} times and answered nothing between: "
                f"{told}; all are ended, make a new LLM"
            )
            raise error from (cause if isinstance(cause, BaseException) else None)
        logger.warning("replica %d of %d is lost and started again: %s", index, len(self._slots), told)
        self.num_restarts += 1
        self._start(index)
        return Answer(index, None)

    def _start(self, index: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = {**self._options, "max_restarts": 0, "scheduling_strategy": placed}
        slot = self._slots[index]
        slot.actor = self._ray.remote(Replica).options(**options).remote(self._arguments)
        slot.call, slot.is_starting = slot.actor.state.remote(), True
        slot.deadline = time.monotonic() + _LOAD_SECONDS

    def _first_state(self, slot: _Slot) -> ReplicaState:
        try:
            state: ReplicaState = self._ray.get(slot.call, timeout=_LOAD_SECONDS)
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, LamellaError):
                raise cause from None
            raise ReplicaLostError(f"an engine could not be started: {type(cause).__name__}: {cause}") from error
        slot.call, slot.is_starting = None, False
        return state

    def _placed(self, num_replicas: int) -> Any:
        from ray.util.placement_group import placement_group, remove_placement_group

        if unknown := sorted(set(self._options) - set(_OPTIONS)):
            raise ConfigError(f"ray_actor_options has {', '.join(unknown)}: engines take {', '.join(_OPTIONS)}")
        names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        wanted = {name: self._options[key] for key, name in names.items() if self._options.get(key)}
        wanted |= self._options.get("resources") or {}
        # A bundle that asks for nothing cannot be placed; this much rounds to no processor.
        group = placement_group([wanted or {"CPU": 0.0001}] * num_replicas, strategy="PACK")
        if not group.wait(_PLACE_SECONDS):
            remove_placement_group(group)
            raise ConfigError(
                f"data_parallel_size={num_replicas} with ray_actor_options={self._options}: Ray has not so much free "
                f"within {_PLACE_SECONDS:.0f} s, of {self._ray.cluster_resources()}; ask for less"
            )
        return group

    def each(self, ask: Callable[[Any], Any], seconds: float) -> Sequence[Any]:
        """What every replica answers to `ask(actor)`, a call that returns a reference; with none under way."""
        return list(self._ray.get([ask(slot.actor) for slot in self._slots], timeout=seconds))

    def close(self) -> None:
        """End them all. Twice is fine."""
        from ray.util.placement_group import remove_placement_group

        for slot in self._slots:
            if slot.actor is not None:
                with contextlib.suppress(Exception):  # it may be gone, or Ray may be
                    self._ray.kill(slot.actor, no_restart=True)
            slot.actor = slot.call = None
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(group)


def _cause(error: BaseException) -> BaseException:
    """What a replica's engine raised, where Ray has wrapped it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error
