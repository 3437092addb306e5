"""HTTP: the protocol class under uvicorn, requests and their bounds, writers of responses, routes, access, TLS."""
