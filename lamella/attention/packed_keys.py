"""The keys that some requests see, one behind the other, as xformers' masks take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """mask: a mask of xformers over the queries of some requests and the keys that they see, block after block without
    gaps. Key i is token `offsets[i]` of page `page_ids[i]`; both int64 [num_keys], on the device."""

    mask: Any
    page_ids: torch.Tensor
    offsets: torch.Tensor
