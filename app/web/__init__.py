"""The web server: the HTTP API under /api/v1, and the pages for browsers."""
