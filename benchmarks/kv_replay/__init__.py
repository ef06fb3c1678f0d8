"""Request traces replayed through schedulers and KV managers, without a model."""
