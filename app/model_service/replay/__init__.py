"""The replay engine: serves scripted and recorded answers in three dialects, for tests and demos.

    python -m app.model_service.replay --port 8791 --scripts folder/with/yaml/files --recordings folder/with/runs

Any model name and any API key are accepted. `script` defines scripts, `recordings` defines recordings.
"""
