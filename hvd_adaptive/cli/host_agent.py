"""What ``hvd-adaptive doctor --hosts`` runs on each host: only the standard library, sent as text over ssh.

It reads one JSON request a line from stdin, answers one JSON object a line on stdout, and ends with stdin, so
that nothing of it outlives the connection.  Requests, by ``ask``:

=========== ========================= ================================================================
``time``                              the clock, in seconds since the epoch
``report``  ``peers``, ``folder``     versions, names, interfaces; which interface leads to the peers
``listen``                            a port on which TCP is echoed or swallowed and UDP is echoed
``ping``    ``address``, ``port``     seconds of a round trip of one byte over TCP, the median of many
``stream``  ``address``, ``port``     bits per second that arrive, over ``seconds``
``datagram`` ``address``, ``port``    whether a UDP packet of ``size`` bytes in all passes unfragmented
=========== ========================= ================================================================
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

TIMEOUT = 10.0
PACKAGES = ("horovod", "torch", "tensorflow", "tf-keras", "numpy", "hvd-adaptive")
_OTHER_NAMES = {"tensorflow": ("tensorflow-cpu", "tensorflow-rocm", "tf-nightly")}
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO = 10, 2  # linux/in.h
_IP_AND_UDP_HEADERS = 28
_LARGEST_PACKET = 65535  # of IPv4; loopback's MTU is one more
_ECHO, _SWALLOW = b"e", b"s"


def report(peers: list[str], folder: str) -> dict[str, Any]:
    """Everything about this host that is known without sending anything."""
    name = socket.gethostname()
    try:
        resolved: str | None = socket.gethostbyname(name)
    except OSError:
        resolved = None
    return {
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "built": _built(),
        "hostname": name,
        "resolved": resolved,
        "interfaces": _interfaces(),
        "routes": {peer: _source_address(peer) for peer in peers},
        "folder": os.path.isdir(folder),
        "cores": len(os.sched_getaffinity(0)),
    }


def _version(package: str) -> str | None:
    for name in (package, *_OTHER_NAMES.get(package, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if package == "hvd-adaptive":  # a checkout on PYTHONPATH has no metadata
        try:
            import hvd_adaptive
        except ImportError:
            return None
        return hvd_adaptive.__version__
    return None


def _built() -> dict[str, str | None]:
    """The framework versions that the installed Horovod was built with."""
    try:
        distribution = importlib.metadata.distribution("horovod")
        with open(str(distribution.locate_file("horovod/metadata.json"))) as file:
            built = json.load(file)
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    return {"torch": built.get("pytorch"), "tensorflow": built.get("tensorflow")}


def _interfaces() -> dict[str, dict[str, Any]]:
    """Each interface that has an IPv4 address: that address and the MTU in bytes."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                with open(f"/sys/class/net/{name}/mtu") as file:
                    mtu = int(file.read())
            except OSError:
                continue
            found[name] = {"address": socket.inet_ntoa(answer[20:24]), "mtu": mtu}
    return found


def _source_address(peer: str) -> str | None:
    """The own address from which packets to ``peer`` go; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def listen() -> dict[str, Any]:
    """Serve pings, streams and datagrams on one port number, until this process ends."""
    server = socket.create_server(("", 0), backlog=64)
    port = server.getsockname()[1]
    packets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    packets.bind(("", port))
    threading.Thread(target=_accept, args=(server,), daemon=True).start()
    threading.Thread(target=_echo_packets, args=(packets,), daemon=True).start()
    return {"port": port}


def _accept(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    with connection:
        connection.settimeout(TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            kind = connection.recv(1)
            if kind == _ECHO:
                while data := connection.recv(64):
                    connection.sendall(data)
                return
            received, began = 0, time.monotonic()
            ended = began
            while data := connection.recv(1 << 20):
                received += len(data)
                ended = time.monotonic()
            connection.sendall(json.dumps([received, ended - began]).encode())
        except OSError:
            return  # the other side says what went wrong


def _echo_packets(packets: socket.socket) -> None:
    while True:
        data, sender = packets.recvfrom(1 << 16)
        packets.sendto(struct.pack("!I", len(data)), sender)  # short, so that only one way is tried


def ping(address: str, port: int, count: int = 30) -> dict[str, Any]:
    times = []
    with socket.create_connection((address, port), timeout=TIMEOUT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_ECHO)
        for _ in range(count):
            began = time.monotonic()
            connection.sendall(b"?")
            if not connection.recv(1):
                raise OSError("the other side closed the connection")
            times.append(time.monotonic() - began)
    return {"seconds": sorted(times)[count // 2]}


def stream(address: str, port: int, duration: float) -> dict[str, Any]:
    block = bytes(1 << 16)
    with socket.create_connection((address, port), timeout=TIMEOUT) as connection:
        connection.sendall(_SWALLOW)
        until = time.monotonic() + duration
        while time.monotonic() < until:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        received, took = json.loads(connection.recv(200))
    return {"bits_per_second": 8 * received / took}


def datagram(address: str, port: int, size: int) -> dict[str, Any]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packets:
        packets.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
        packets.settimeout(0.5)
        packets.connect((address, port))
        for _ in range(3):  # a single one may be lost on any network
            try:
                packets.send(bytes(min(size, _LARGEST_PACKET) - _IP_AND_UDP_HEADERS))
                packets.recv(64)
                return {"passed": True}
            except OSError:
                continue
    return {"passed": False}


def main() -> None:
    answers: dict[str, Callable[..., dict[str, Any]]] = {
        "time": lambda: {"time": time.time()},
        "report": report,
        "listen": listen,
        "ping": ping,
        "stream": stream,
        "datagram": datagram,
    }
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = answers[request.pop("ask")](**request)
        except OSError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
