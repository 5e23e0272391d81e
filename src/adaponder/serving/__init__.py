"""Serves one engine at OpenAI-compatible HTTP routes, with a page that shows depth."""
