"""In place of Grafana, which cannot be had here: healthy if all that Grafana would read is in its place and readable."""

import http.server
import json
import os
from pathlib import Path


def missing() -> list[str]:
    """What Grafana would look for in vain."""
    provisioning = Path("/etc/grafana/provisioning")
    files = [
        *(provisioning / kind / "swathe.yml" for kind in ("dashboards", "datasources")),
        Path(os.environ["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]),
        Path("/usr/share/grafana/public/swathe/runbook.md"),
        Path(os.environ["GF_SECURITY_ADMIN_PASSWORD__FILE"]),
    ]
    found = [str(path) for path in files if not os.access(path, os.R_OK) or not path.read_text()]
    found += [] if os.access("/var/lib/grafana", os.W_OK) else ["a writable /var/lib/grafana"]
    for path in Path("/var/lib/grafana/dashboards").glob("*.json"):
        json.loads(path.read_text())
    return found


class Handler(http.server.BaseHTTPRequestHandler):
    """``/api/health`` only."""

    def do_GET(self) -> None:
        body = json.dumps({"missing": missing()}).encode()
        self.send_response(503 if missing() else 200)
        self.end_headers()
        self.wfile.write(body)


http.server.ThreadingHTTPServer(("0.0.0.0", 3000), Handler).serve_forever()  # noqa: S104
