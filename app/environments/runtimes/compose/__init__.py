"""Several containers as one environment, as a compose file describes them.

`provider` makes environments, `environment` is the result; `app.compose_file` reads and checks the files.
Nothing is imported here: reading a file needs no engine's client.
"""
