"""Several containers as one environment, as a compose file describes them.

`file` reads and refuses (pure: a dataset's reader uses it, too), `provider` makes, `environment` is what it makes.
Nothing is imported here: who only reads a file needs no engine's client.
"""
