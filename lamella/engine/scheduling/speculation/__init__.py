"""Speculative decoding without a second model: tokens guessed from texts that are there, verified in one step."""
