"""The model gateway: the one door through which every agent reaches every model. A process of its own.

python -m app.model_service.gateway --port 8766
"""
