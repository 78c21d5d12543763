"""The runtime `kubernetes`: a pod per environment, entered over execs that stay open."""
