"""Real servers on free loopback ports, each as a context manager that ends what it started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

GOOGLE_TOKEN = "geheimnis"
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The one account that Azurite has, and its key, which its documentation publishes."""

START = Path(__file__).resolve().parents[2] / "cache" / "start"
BUCKET = "team"
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testkey",
    "AWS_SECRET_ACCESS_KEY": "testsecret123",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def free_ports(count: int = 1) -> list[int]:
    """Ports nobody listens on now, nor 10,000 above (SeaweedFS adds that for gRPC)."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        port = port % 20_000 + 20_000
        if port not in found and all(_free(p) for p in (port, port + 10_000)):
            found.append(port)
    return found


def _free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def program(name: str) -> str | None:
    """A server's program, on the path or beside this Python."""
    places = (str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin")
    return shutil.which(name, path=os.pathsep.join(places))


@contextlib.contextmanager
def running(command: list[str], log: Path, **options):
    """A server process; killed, with its children, when the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(ready, log: Path, process=None, limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while True:
        with contextlib.suppress(OSError):
            if ready():
                return
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            message = f"server did not start:\n{log.read_text(errors='replace')[-2000:]}"
            raise RuntimeError(message)
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return reply.status < 500
    except urllib.error.HTTPError as error:
        return error.code < 500


@dataclass
class Nginx:
    url: str
    tls_url: str
    user: str
    password: str
    folder: Path
    process: subprocess.Popen

    @property
    def writer_url(self) -> str:
        return self.url.replace("://", f"://{self.user}:{self.password}@")

    @property
    def certificate(self) -> Path:
        return self.folder / "conf" / "cert.pem"

    def clear(self) -> None:
        for kind in ("ac", "cas"):
            shutil.rmtree(self.folder / "data" / kind, ignore_errors=True)

    def blob(self, digest: str) -> Path:
        return self.folder / "data" / "cas" / digest[:2] / digest


@contextlib.contextmanager
def nginx(folder: Path, lines: str = ""):
    """The server of `cache/`, as shipped; with lines of its user's own."""
    port, tls_port = free_ports(2)
    log = folder / "start.log"
    home = folder / "server"
    (home / "conf").mkdir(parents=True)
    (home / "conf" / "local.conf").write_text(lines)
    with running([str(START), str(home), str(port), str(tls_port)], log) as process:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"), log, process)
        password = re.search(r"password: (\w+)", log.read_text())[1]
        yield Nginx(
            f"http://127.0.0.1:{port}",
            f"https://localhost:{tls_port}",
            "ci",
            password,
            home,
            process,
        )


@contextlib.contextmanager
def seaweed(folder: Path):
    """SeaweedFS with its S3 gate; yields the endpoint."""
    master, volume, filer, s3 = free_ports(4)
    config = folder / "s3.json"
    identity = {
        "name": "dev",
        "credentials": [
            {
                "accessKey": S3_ENVIRONMENT["AWS_ACCESS_KEY_ID"],
                "secretKey": S3_ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
            }
        ],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    data = folder / "data"
    data.mkdir()
    log = folder / "weed.log"
    command = [
        program("weed"),
        "server",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={data}",
        f"-master.port={master}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=256",
        "-volume.max=20",
        f"-volume.port={volume}",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={config}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    with running(command, log) as process:
        endpoint = f"http://127.0.0.1:{s3}"
        wait_for(lambda: answers(endpoint), log, process)
        _make_bucket(endpoint, log)
        yield endpoint


@contextlib.contextmanager
def rclone(folder: Path):
    """rclone's S3 server, which ignores every condition of a put; yields the endpoint."""
    (port,) = free_ports()
    data = folder / "data"
    (data / BUCKET).mkdir(parents=True)
    log = folder / "rclone.log"
    auth = f"{S3_ENVIRONMENT['AWS_ACCESS_KEY_ID']},{S3_ENVIRONMENT['AWS_SECRET_ACCESS_KEY']}"
    command = [
        program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", auth,
        "--config", "/dev/null", str(data),
    ]  # fmt: skip
    with running(command, log) as process:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}"), log, process)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def moto(folder: Path):
    """moto's server; yields the endpoint."""
    (port,) = free_ports()
    log = folder / "moto.log"
    command = [program("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with running(command, log) as process:
        endpoint = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(endpoint), log, process)
        _make_bucket(endpoint, log)
        yield endpoint


@contextlib.contextmanager
def google(folder: Path, moto_endpoint: str):
    """Google's XML interface as moto speaks it, whose conditions nginx puts into S3's words.

    Yields the endpoint.
    """
    lines = f"""
    if ($http_authorization != "Bearer {GOOGLE_TOKEN}") {{ set $refused "$uri"; }}
    if ($refused ~ "^/{BUCKET}") {{ return 403; }}
    set $create "";
    if ($http_x_goog_if_generation_match = "0") {{ set $create "*"; }}
    location /{BUCKET}/ {{ proxy_pass {moto_endpoint}; proxy_set_header If-None-Match $create; }}
    location = /{BUCKET} {{ proxy_pass {moto_endpoint}; }}
    location /nowhere/ {{ proxy_pass {moto_endpoint}; }}
    """
    with nginx(folder, lines) as server:
        yield server.url


@contextlib.contextmanager
def azurite(folder: Path):
    """Azurite's blob server, with a container; yields the endpoint."""
    (port,) = free_ports()
    log = folder / "azurite.log"
    command = [
        program("azurite-blob"), "--silent", "--disableTelemetry", "--skipApiVersionCheck",
        "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder),
    ]  # fmt: skip
    with running(command, log) as process:
        endpoint = f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}"
        wait_for(lambda: not _free(port), log, process)
        wait_for(lambda: _make_container(endpoint), log, process)
        yield endpoint


def _make_container(endpoint: str) -> bool:
    """Make the container by a request signed as Azure's "Shared Key" says."""
    import base64
    import hashlib
    import hmac

    now = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    headers = {"x-ms-date": now, "x-ms-version": "2023-11-03"}
    told = "".join(f"{name}:{value}\n" for name, value in headers.items())
    blank = "\n" * 12  # the standard headers, none of which is sent
    text = f"PUT{blank}{told}/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{BUCKET}\nrestype:container"
    made = hmac.new(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{base64.b64encode(made).decode()}"
    url = f"{endpoint}/{BUCKET}?restype=container"
    call = urllib.request.Request(url, method="PUT", headers=headers)
    with urllib.request.urlopen(call, timeout=5) as reply:
        return reply.status == 201


@contextlib.contextmanager
def tinyproxy(folder: Path, lines: str = ""):
    """A proxy; yields its address and the log of what it was asked for."""
    (port,) = free_ports()
    config, log = folder / "proxy.conf", folder / "proxy.log"
    config.write_text(f"Port {port}\nListen 127.0.0.1\nLogLevel Connect\n{lines}\n")
    with running([program("tinyproxy"), "-d", "-c", str(config)], log) as process:
        wait_for(lambda: not _free(port), log, process)
        yield f"http://127.0.0.1:{port}", log


def certificate(folder: Path, name: str, authority: str = "", passphrase: str = "") -> None:
    """Make `NAME.pem` and `NAME.key` by openssl, signed by `AUTHORITY.pem` or by itself."""
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-days", "2", "-subj", f"/CN={name}"),
        *("-addext", f"subjectAltName=DNS:{name}"),
        # Python 3.13 takes no authority that does not say it is one.
        *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
        *("-keyout", f"{name}.key", "-out", f"{name}.pem"),
        *(("-passout", f"pass:{passphrase}") if passphrase else ("-nodes",)),
    ]
    if authority:
        command += ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"]
    subprocess.run(command, check=True, cwd=folder, capture_output=True)


def _make_bucket(endpoint: str, log: Path) -> None:
    """Make the bucket by a signed PUT, as often as it takes a server to become one."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        access_key_id=S3_ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        secret_access_key=S3_ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "5s"},
        retry_config={"max_retries": 0},
    )

    def ready() -> bool:
        _signed_put(f"{endpoint}/{BUCKET}")
        try:
            # Not empty: SeaweedFS makes its volumes at the first byte, which takes it seconds.
            obstore.put(store, "ready", b"ready", use_multipart=False)
            obstore.delete(store, "ready")
        except obstore.exceptions.BaseError:
            return False
        return True

    wait_for(ready, log)


def _signed_put(url: str) -> None:
    """PUT with an empty body, signed as AWS Signature Version 4 says."""
    import hashlib
    import hmac
    from urllib.parse import urlsplit

    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    empty = hashlib.sha256(b"").hexdigest()
    parts = urlsplit(url)
    names = "host;x-amz-content-sha256;x-amz-date"
    request = (
        f"PUT\n{parts.path}\n\nhost:{parts.netloc}\nx-amz-content-sha256:{empty}\n"
        f"x-amz-date:{now}\n\n{names}\n{empty}"
    )
    hashed = hashlib.sha256(request.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashed}"
    key = f"AWS4{S3_ENVIRONMENT['AWS_SECRET_ACCESS_KEY']}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    credential = f"{S3_ENVIRONMENT['AWS_ACCESS_KEY_ID']}/{scope}"
    headers = {
        "x-amz-date": now,
        "x-amz-content-sha256": empty,
        "Authorization": f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, "
        f"Signature={signature}",
    }
    call = urllib.request.Request(url, method="PUT", headers=headers, data=b"")
    with contextlib.suppress(OSError), urllib.request.urlopen(call, timeout=5):
        pass
