"""What the benchmark of speculation sends, and how it measures."""
