"""Who runs next, and where: pure policy, the dispatcher that carries it out, and the reconciler under it."""
