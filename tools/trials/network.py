"""Two hosts on one machine: network namespaces and a cable (veth) that can be cut. Needs Linux, root, iproute2."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

DEVICE = "veth0"


@dataclass(frozen=True)
class Host:
    """A network of its own, which lives as long as the process that holds it.

    Attributes:
        address: Its IPv4 address.
        holder: The process.
    """

    address: str
    holder: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """What starts a command there."""
        return ("nsenter", "--target", str(self.holder), "--net")

    def plug(self, *, is_in: bool) -> None:
        """Plugs the cable in, or pulls it out: what is sent is lost without a word, for the other side as well."""
        _ip(*self.prefix, "ip", "link", "set", DEVICE, "up" if is_in else "down")


def why_not() -> str | None:
    """Returns why there can be no two hosts here; None if there can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"there is no {' or '.join(missing)} (Debian: util-linux, iproute2)"
    tried = ["unshare", "--net", "ip", "link", "add", DEVICE, "type", "veth", "peer", "name", "veth1"]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return f"network namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts and the cable between them; nothing of it is left afterwards.

    Raises:
        subprocess.CalledProcessError: If that is not allowed; ``why_not`` tells before.
    """
    with ExitStack() as stack:
        first, second = (stack.enter_context(_host(f"10.77.0.{number}")) for number in (1, 2))
        there = str(second.holder)
        _ip(*first.prefix, "ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", there)
        for host in (first, second):
            _ip(*host.prefix, "ip", "address", "add", f"{host.address}/24", "dev", DEVICE)
            _ip(*host.prefix, "ip", "link", "set", "lo", "up")
            host.plug(is_in=True)
        yield first, second


@contextmanager
def _host(address: str) -> Iterator[Host]:
    # `echo` tells that the namespace is there; `cat` ends with the pipe, so also when this program is killed.
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None  # noqa: S101 - narrows the type
            holder.stdout.readline()
            yield Host(address, holder.pid)
        finally:
            holder.kill()


def _ip(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
