"""The model gateway, a process of its own through which all agents call all models.

python -m app.model_service.gateway --port 8766
"""
