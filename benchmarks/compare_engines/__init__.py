"""The same prompts, weights and threads through lamella and other engines, each in its own interpreter."""
