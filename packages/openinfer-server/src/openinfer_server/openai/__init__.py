"""OpenAI's two older APIs, completions and chat completions, and the routes about models."""
