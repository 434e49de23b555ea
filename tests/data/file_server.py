"""A real HTTP server in a separate process, with the faults of real ones; run as a script.

Usage: file_server.py FOLDER MODE, where MODE is "ranges" (honours Range), "plain" (ignores it) or
"drops" (closes every connection after 1000 bytes). Prints its port; appends a line a request to
FOLDER/requests.log.
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
DROP_AFTER = 1000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        with (FOLDER / "requests.log").open("a") as log:
            log.write(f"{self.path} {asked}\n")
        path = FOLDER / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and MODE != "plain" else 0
        if start >= len(content) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(
            content[start : start + DROP_AFTER] if MODE == "drops" else content[start:]
        )

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
