"""What an engine shows of itself while it works: metrics, a line in the log, and a trace."""
