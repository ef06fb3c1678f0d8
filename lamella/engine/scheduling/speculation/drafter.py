"""Guesses the next tokens of the requests that decode, as many as pay."""

from __future__ import annotations

from collections.abc import Mapping

from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.engine.scheduling.speculation.acceptance import AcceptanceRecord
from lamella.engine.scheduling.speculation.draft_budget import num_drafts_each
from lamella.engine.scheduling.speculation.request_text import RequestText
from lamella.engine.scheduling.speculation.settings import SpeculationSettings
from lamella.engine.scheduling.speculation.shared_outputs import SharedOutputs
from lamella.engine.scheduling.speculation.step_costs import StepCosts


class Drafter:
    """Keeps the text of every running request. Which tokens it guesses changes how fast requests run, never what they
    get."""

    def __init__(self, settings: SpeculationSettings, costs: StepCosts) -> None:
        self.settings, self.costs = settings, costs
        self.clear()

    def clear(self) -> None:
        """Forget all texts, whatever state an exception left behind."""
        self._texts: dict[Request, RequestText] = {}
        self._record = AcceptanceRecord()
        self._shared = SharedOutputs(self.settings.num_shared_outputs)

    def drafts(self, rows: RequestRows, room: Mapping[int, int], num_tokens: int, most: int) -> dict[int, list[int]]:
        """room: row -> how many drafts it may have at most, for the rows that decode. num_tokens: how many tokens the
        step computes anyhow. most: drafts of all rows together. -> row -> its drafts, for rows that have any."""
        settings = self.settings
        candidates = {}
        for row, num_free in room.items():
            if rows.request(row).logits_functions:
                continue  # functions with state are called once for each token that the output gets, in order
            text = self._text_of(rows, row)
            candidate = text.candidate(settings.num_draft_tokens, settings.least_match_tokens)
            if not candidate.token_ids or num_free < 1:
                continue
            num_drafts = min(num_free, len(candidate.token_ids))
            if settings.drafts_per_match_token is not None:
                num_drafts = min(num_drafts, max(1, int(settings.drafts_per_match_token * candidate.num_matched)))
            token_ids = _possible(rows, row, candidate.token_ids[:num_drafts])
            chances = text.record.chances(candidate.num_matched, len(token_ids), settings.least_probability)
            if chances:
                candidates[row] = token_ids, chances
        if not candidates:
            return {}
        counts = num_drafts_each(self.costs, num_tokens, [chances for _, chances in candidates.values()], most)
        return {
            row: token_ids[:count]
            for (row, (token_ids, _)), count in zip(candidates.items(), counts, strict=True)
            if count
        }

    def forget(self, request: Request) -> None:
        """The request has ended, and is in no row any more."""
        if self._texts.pop(request, None) is not None:
            self._shared.add(request.salt, request.token_ids[request.num_prompt_tokens :].tolist())

    def _text_of(self, rows: RequestRows, row: int) -> RequestText:
        """The row's text, with all tokens that are known."""
        request, num_known = rows.request(row), rows.num_tokens_at[row]
        text = self._texts.get(request)
        if text is None or text.num_tokens > num_known:
            text = self._texts[request] = RequestText(AcceptanceRecord(self._record), self._shared.of(request.salt))
        if text.num_tokens < num_known:
            text.extend(rows.tokens[row, text.num_tokens : num_known].tolist())
        return text


def _possible(rows: RequestRows, row: int, token_ids: list[int]) -> list[int]:
    """The first of these drafts, as many as may come in this order: none that ends the request, for nothing comes
    behind it, and none that its grammar does not allow."""
    request = rows.request(row)
    end_ids = request.eos_token_ids | request.stop_token_ids
    num_possible = next((index for index, token_id in enumerate(token_ids) if token_id in end_ids), len(token_ids))
    token_ids = token_ids[:num_possible]
    if request.grammar is not None:
        output_ids = rows.tokens[row, request.num_prompt_tokens : rows.num_tokens_at[row]]
        token_ids = token_ids[: request.grammar.num_allowed(output_ids, token_ids)]
    return token_ids
