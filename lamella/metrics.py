"""What `get_metrics` returns."""

from lamella.observability.metric_values import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
