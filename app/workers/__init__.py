"""What runs on an instance: the single-task worker, the pool worker, the control worker, and the spine they share."""
