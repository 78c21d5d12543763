"""The HTTP API: `/api/v1`. Each operation is one function with the models of its input and output."""
