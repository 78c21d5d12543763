"""The model gateway: every agent reaches every model through it. A process of its own.

python -m app.model_service.gateway --port 8766
"""
