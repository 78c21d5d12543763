"""The training loop: a run for each step, its groups, the hand-out, a trainer, the next version, the commit."""
