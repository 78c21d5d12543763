"""Schedules tasks: the policy, the dispatcher that applies it, the reconciler that repairs differences."""
