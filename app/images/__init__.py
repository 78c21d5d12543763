"""Images of environments: names, pulls, builds, the cache of a host."""
