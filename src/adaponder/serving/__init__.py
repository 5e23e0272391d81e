"""An OpenAI-compatible HTTP server, and a page that shows depth, over one engine."""
