"""Installs agent frameworks on this host, once each, from lock files with hashes. See README.md."""

from __future__ import annotations

from app.agents.installation.installer import Installer
from app.agents.installation.libraries import Needs, require

__all__ = ["Installer", "Needs", "require"]
