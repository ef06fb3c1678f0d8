"""Scripts, each for one engine's interpreter; none is imported from here."""
