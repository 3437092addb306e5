"""From engine events to what clients read: choices, responses, the link to the engine, delivery."""
