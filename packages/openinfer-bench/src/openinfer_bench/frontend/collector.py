"""A collector of OpenTelemetry spans that takes what it is sent and drops it.

python -m openinfer_bench.frontend.collector

Prints its URL when it listens; ends on SIGTERM.
"""

from http.server import BaseHTTPRequestHandler, HTTPServer


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Takes a batch."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Says nothing."""


def main() -> None:
    """Listens until it is ended."""
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    print(f"http://127.0.0.1:{server.server_port}/v1/traces", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
