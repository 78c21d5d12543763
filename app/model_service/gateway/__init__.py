"""The model gateway, a separate process through which all agents call all models.

python -m app.model_service.gateway --port 8766
"""
