"""Certificates of servers, for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def new_certificate(folder: Path) -> tuple[Path, Path]:
    """The files of a new certificate for 127.0.0.1, and of its key."""
    made, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(made), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return made, key
