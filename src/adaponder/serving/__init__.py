"""An OpenAI-compatible server and a page of depth over one engine: the only room that knows HTTP."""
