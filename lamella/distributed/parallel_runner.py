"""Runs the steps of an engine with several workers: sends them each plan, then computes its own part."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lamella.distributed.plan_message import encode_plan
from lamella.distributed.workers import Workers
from lamella.errors import WorkerLostError
from lamella.model_executor.runner import ModelRunner
from lamella.model_executor.step_plan import StepPlan


class ParallelRunner(ModelRunner):
    """Worker 0's. Raises WorkerLostError where another is gone; whatever else ends a step in its middle ends the
    workers, too, as they would wait for the rest of it."""

    def __init__(self, workers: Workers, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._workers = workers

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> torch.Tensor:
        self._workers.send(encode_plan(plan, self._known_token_ids(plan)))
        try:
            return super().compute(plan)
        except WorkerLostError as error:
            raise self._workers.lost(error) from error
        except BaseException as error:
            self._workers.lost(error)
            raise

    def _known_token_ids(self, plan: StepPlan) -> np.ndarray:
        """int64 [T]: with the samples of the step before, which only this worker has."""
        if plan.token_sources is None:
            return plan.token_ids
        token_ids = self._with_last_samples(plan.token_sources, torch.from_numpy(plan.token_ids).to(self.device))
        known: np.ndarray = token_ids.cpu().numpy()
        return known
