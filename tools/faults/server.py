"""An HTTP server in a thread of this process whose answers go wrong as they are told to."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter
from http import HTTPStatus

from tools.faults.kinds import Faults, Sent, spoiled
from tools.faults.origins import Answer, Origin, Request

_DRIP_PAUSE_S = 0.05
_START_TIMEOUT_S = 10.0


class FaultyServer:
    """Serves an origin, with faults, as a context.

    Args:
        origin: What is right.
        faults: What goes wrong; ``faults`` can be set to others at any time.
        keeps_listings: Whether a listing, once given, is given again for ever.

    Attributes:
        url: Its address, without a slash at the end.
        counts: How often each fault was met, and under ``"good"`` how many requests met none.
        num_bytes: Bytes of bodies that were sent.
    """

    def __init__(self, origin: Origin, faults: Faults | None = None, *, keeps_listings: bool = False) -> None:
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        self.url, self.num_bytes = "", 0
        self._origin, self._keeps_listings = origin, keeps_listings
        self._listings: dict[str, Answer] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="faulty-server", daemon=True)
        self._started = threading.Event()
        self._ended: asyncio.Event | None = None

    def __enter__(self) -> FaultyServer:  # noqa: PYI034 - Self needs Python 3.11
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S):
            raise TimeoutError("the server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server and all of its connections: from now on the address is dead."""
        if self._thread.is_alive() and self._ended is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        under_way: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - narrows the type
            under_way.add(task)
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    if not await self._answer(_request(head.decode("latin-1")), writer):
                        break
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                pass  # the client has what it wanted, gave up, or this server ends
            finally:
                under_way.discard(task)
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._ended.wait()
        server.close()
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; False if the connection ends with it."""
        sent = await self._loop.run_in_executor(None, self._sent, request)
        if sent.num_bytes == -1:
            await asyncio.sleep(float("inf"))
        writer.write(_head(sent.answer))
        if request.method == "HEAD":
            await writer.drain()
            return True
        body = sent.answer.body
        writer.write(body[: sent.num_bytes])
        self.num_bytes += len(body[: sent.num_bytes])
        await writer.drain()
        if sent.then == "stall":
            await asyncio.sleep(float("inf"))
        elif sent.then == "drip":
            for place in range(sent.num_bytes or 0, len(body)):
                writer.write(body[place : place + 1])
                await writer.drain()
                await asyncio.sleep(_DRIP_PAUSE_S)
        elif sent.then == "reset":
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return sent.then in ("", "drip")

    def _sent(self, request: Request) -> Sent:
        answer = self._right(request)
        kind = self.faults.choose() if request.method == "GET" and not request.is_listing else None
        self.counts[kind or "good"] += 1
        return Sent(answer) if kind is None else spoiled(kind, request, answer, self._origin.answer)

    def _right(self, request: Request) -> Answer:
        if not (self._keeps_listings and request.is_listing):
            return self._origin.answer(request)
        if request.target not in self._listings:
            self._listings[request.target] = self._origin.answer(request)
        return self._listings[request.target]


def _request(head: str) -> Request:
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines if line)
    return Request(method, target, {name.strip().lower(): value.strip() for name, _, value in pairs})


def _head(answer: Answer) -> bytes:
    headers = {name: value for name, value in answer.headers.items() if name.lower() != "content-length"}
    length = next((v for name, v in answer.headers.items() if name.lower() == "content-length"), len(answer.body))
    if answer.body:
        length = len(answer.body)
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", f"Content-Length: {length}"]
    return ("\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items())]) + "\r\n\r\n").encode()
