"""The HTTP API: `/api/v1`. Each operation is one function with the models of what it takes and gives."""
