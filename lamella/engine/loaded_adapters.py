"""The adapters that are loaded: those that requests use, pinned ones, and the ones used last.

An adapter has a number of its own each time that it is loaded, by which steps name it. What tells its KV from others'
is the digest of its weights: loaded again with the same, it finds what is cached; with others under the same name, it
does not.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lamella.argument_checks import shown
from lamella.engine.lora_request import LoRARequest
from lamella.errors import RequestError
from lamella.model_executor.adapters.adapter_reader import AdapterReader, ReadAdapter
from lamella.model_executor.layers.adapters import Adapter

logger = logging.getLogger(__name__)

InUse = Callable[[], Mapping[int, int]]


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """number: what steps call it."""

    number: int
    request: LoRARequest
    adapter: Adapter
    digest: str
    num_bytes: int
    is_pinned: bool = False


class LoadedAdapters:
    """reader: None: there are no adapters here. running: by number, what steps find adapters in; this class alone
    changes it. max_loaded: most adapters that stay, but for those in use and pinned ones. max_rank: None: any.

    in_use, here and below: gives adapter's number -> how many requests use it. It is asked only where that matters.
    """

    def __init__(
        self, reader: AdapterReader | None, running: dict[int, Adapter], *, max_loaded: int, max_rank: int | None
    ) -> None:
        self._reader = reader
        self._running = running
        self._max_loaded = max_loaded
        self._max_rank = max_rank
        self._numbers = itertools.count(1)
        self._loaded: OrderedDict[int, LoadedAdapter] = OrderedDict()  # by lora_int_id, the one used last at the end

    def ids(self) -> set[int]:
        """lora_int_ids."""
        return set(self._loaded)

    def find(self, request: LoRARequest, in_use: InUse) -> LoadedAdapter | None:
        """The adapter, or None if it is not loaded. Raises RequestError where adapters are not enabled or the id is
        another's."""
        if not isinstance(request, LoRARequest):
            raise RequestError(
                f"lora_request={shown(request)} is a {type(request).__name__}; give a LoRARequest(lora_name, "
                "lora_int_id, lora_path)"
            )
        if self._reader is None:
            raise RequestError(
                f"lora_request={shown(request)}: adapters are not enabled; make the engine with enable_lora=True"
            )
        known = self._loaded.get(request.lora_int_id)
        if known is not None:
            self._require_same(known, request)
            self._use(known)
            self._make_room(in_use)
        return known

    def read(self, request: LoRARequest) -> ReadAdapter:
        """What is to `enter`. It changes nothing here, so steps may run meanwhile. Raises ModelLoadError for what
        cannot be read."""
        assert self._reader is not None, "`find` has refused the request"
        return self._reader.read(Path(request.path), most_rank=self._max_rank)

    def enter(self, request: LoRARequest, read: ReadAdapter, in_use: InUse) -> LoadedAdapter:
        """The adapter that was read, loaded from now on; or the one that another thread has loaded under its id since.
        Raises as `find` does."""
        known = self.find(request, in_use)
        if known is not None:
            return known
        loaded = LoadedAdapter(next(self._numbers), request, read.adapter, read.digest, read.num_bytes)
        self._use(loaded)
        self._make_room(in_use)
        logger.info(
            "adapter %s (lora_int_id %d): rank %d, %d modules%s, %.1f MiB; %d loaded, %.1f MiB",
            shown(request.lora_name),
            request.lora_int_id,
            read.rank,
            read.num_modules,
            f", {read.num_left_out} of other parts left out" if read.num_left_out else "",
            read.num_bytes / 2**20,
            len(self._loaded),
            sum(each.num_bytes for each in self._loaded.values()) / 2**20,
        )
        return loaded

    def keep(self, adapter: LoadedAdapter, in_use: InUse) -> LoadedAdapter:
        """`adapter`, which `find` or `enter` has returned, loaded again if it had to make room since; or the same
        weights, loaded under its id meanwhile. Raises RequestError where others have its id by now."""
        known = self._loaded.get(adapter.request.lora_int_id)
        if known is None:
            self._use(adapter)
            self._make_room(in_use)
            return adapter
        if known is not adapter and (known.request, known.digest) != (adapter.request, adapter.digest):
            raise RequestError(
                f"lora_int_id={adapter.request.lora_int_id} has other weights than when the prompt was parsed; parse "
                "it again"
            )
        self._use(known)
        return known

    def remove(self, lora_int_id: int, in_use: InUse) -> bool:
        """False where no such adapter is loaded. Raises RequestError while requests use it."""
        known = self._loaded.get(lora_int_id)
        if known is None:
            return False
        if num_requests := in_use().get(known.number, 0):
            raise RequestError(
                f"lora_int_id={lora_int_id}: {num_requests} unfinished requests use {shown(known.request.lora_name)}; "
                "step until they have finished, or abort them"
            )
        self._drop(lora_int_id)
        return True

    def pin(self, lora_int_id: int) -> bool:
        """False where no such adapter is loaded."""
        known = self._loaded.get(lora_int_id)
        if known is None:
            return False
        known.is_pinned = True
        return True

    @staticmethod
    def _require_same(known: LoadedAdapter, request: LoRARequest) -> None:
        if known.request != request:
            raise RequestError(
                f"lora_int_id={request.lora_int_id} of {shown(request.lora_name)} at {shown(request.path)} is that of "
                f"{shown(known.request.lora_name)} at {shown(known.request.path)}, which is loaded; give another id, "
                f"or call remove_lora({request.lora_int_id}) first"
            )

    def _use(self, adapter: LoadedAdapter) -> None:
        """Make it the one used last, loaded if it is not."""
        self._running[adapter.number] = adapter.adapter
        self._loaded[adapter.request.lora_int_id] = adapter
        self._loaded.move_to_end(adapter.request.lora_int_id)

    def _make_room(self, in_use: InUse) -> None:
        """Where there are too many, those used least recently go, but not the one used last."""
        if len(self._loaded) <= self._max_loaded:
            return
        used = in_use()
        for lora_int_id, other in list(self._loaded.items())[:-1]:
            if len(self._loaded) <= self._max_loaded:
                return
            if not other.is_pinned and not used.get(other.number, 0):
                logger.info("adapter %s makes room", shown(other.request.lora_name))
                self._drop(lora_int_id)

    def _drop(self, lora_int_id: int) -> None:
        self._running.pop(self._loaded.pop(lora_int_id).number)
