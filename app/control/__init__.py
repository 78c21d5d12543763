"""The control worker: dispatching, reconciling, scheduled evaluations, webhooks and metrics."""
