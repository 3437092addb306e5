"""Writers over fake transports: what is written when, and what is held."""

import asyncio

import pytest

from openinfer_server.http.writers import DIRECT_WRITE, DirectWriter, SendWriter, stream_writer


class FakeTransport:
    """Takes what it is given; its buffer's size is set by the test."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.buffered = 0
        self.aborted = False

    def write(self, data) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def abort(self) -> None:
        self.aborted = True


class FakeConnection:
    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.writer = None

    def attach(self, writer) -> None:
        self.writer = writer
        writer.resume()

    def detach(self) -> None:
        self.writer = None


class Sent(list):
    """Collects ASGI messages; holds the sender while `blocked`."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()

    async def __call__(self, message) -> None:
        await self.free.wait()
        self.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self)


def put(writer, *parts: bytes) -> None:
    writer.events += parts
    writer.flush()


def test_direct_parts_of_one_flush_are_one_chunk():
    async def main() -> None:
        connection, sent = FakeConnection(), Sent()
        writer = DirectWriter(connection, sent, max_buffered_bytes=1000)
        put(writer, b"early")
        assert connection.transport.written == []
        await writer.start()
        put(writer, b"a", b"bc")
        put(writer)
        put(writer, b"")  # an empty chunk would end the response
        put(writer, b"x" * 17)
        assert connection.transport.written == [b"5\r\nearly\r\n", b"3\r\nabc\r\n", b"11\r\n" + b"x" * 17 + b"\r\n"]
        await writer.end(1)
        assert connection.writer is None
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        assert (sent[1]["body"], sent[1]["more_body"]) == (b"", False)

    asyncio.run(main())


def test_direct_holds_while_paused_and_writes_once_on_resume():
    async def main() -> None:
        connection = FakeConnection()
        writer = DirectWriter(connection, Sent(), max_buffered_bytes=1000)
        await writer.start()
        connection.writer.pause()
        put(writer, b"a")
        put(writer, b"b")
        assert connection.transport.written == []
        connection.writer.resume()
        assert connection.transport.written == [b"1\r\na\r\n1\r\nb\r\n"]
        put(writer, b"c")
        assert len(connection.transport.written) == 2

    asyncio.run(main())


@pytest.mark.parametrize("in_transport", [0, 60])
def test_direct_beyond_the_bound_is_dropped(in_transport):
    async def main() -> None:
        connection = FakeConnection()
        connection.transport.buffered = in_transport
        writer = DirectWriter(connection, Sent(), max_buffered_bytes=100)
        await writer.start()
        writer.pause()
        put(writer, b"x" * (90 - in_transport))  # 6 more bytes of framing
        assert not writer.dropped.done()
        put(writer, b"y" * 10)
        assert writer.dropped.done()
        assert connection.transport.aborted
        put(writer, b"z" * 1000)  # nothing is kept for the dead
        assert connection.transport.written == []
        await writer.end(1)

    asyncio.run(main())


def test_direct_end_waits_for_the_reader_up_to_its_deadline():
    async def main() -> None:
        connection, sent = FakeConnection(), Sent()
        writer = DirectWriter(connection, sent, max_buffered_bytes=100)
        await writer.start()
        writer.pause()
        put(writer, b"last")
        ending = asyncio.ensure_future(writer.end(20))
        await asyncio.sleep(0)
        assert not ending.done()
        writer.resume()
        await ending
        assert connection.transport.written == [b"4\r\nlast\r\n"]
        assert len(sent) == 2

        late = DirectWriter(connection, sent, max_buffered_bytes=100)
        await late.start()
        late.pause()
        put(late, b"last")
        await late.end(0.01)
        assert connection.transport.aborted
        assert len(sent) == 3  # its head, and no end

    asyncio.run(main())


def test_direct_end_waits_also_when_only_the_transport_is_full():
    """ASGI's `send` would wait for the transport without a deadline."""

    async def main() -> None:
        connection, sent = FakeConnection(), Sent()
        writer = DirectWriter(connection, sent, max_buffered_bytes=100)
        await writer.start()
        put(writer, b"last")
        writer.pause()
        await writer.end(0.01)
        assert writer.was_slow
        assert len(sent) == 1

    asyncio.run(main())


def test_direct_connection_lost_before_the_end_is_not_waited_for():
    async def main() -> None:
        connection = FakeConnection()
        writer = DirectWriter(connection, Sent(), max_buffered_bytes=100)
        await writer.start()
        writer.lost()
        await asyncio.wait_for(writer.end(3600), 10)
        assert not writer.was_slow

    asyncio.run(main())


def test_direct_lost_connection_ends_the_waiting():
    async def main() -> None:
        connection = FakeConnection()
        writer = DirectWriter(connection, Sent(), max_buffered_bytes=100)
        await writer.start()
        writer.pause()
        put(writer, b"last")
        ending = asyncio.ensure_future(writer.end(20))
        await asyncio.sleep(0)
        writer.lost()
        await ending
        put(writer, b"more")
        assert connection.transport.written == []
        assert not writer.was_slow

    asyncio.run(main())


def test_send_joins_what_comes_while_the_reader_is_slow():
    async def main() -> None:
        sent = Sent()
        writer = SendWriter(sent, max_buffered_bytes=100)
        put(writer, b"early")
        await writer.start()
        await asyncio.sleep(0)
        sent.free.clear()
        put(writer, b"a")
        put(writer, b"b")
        await asyncio.sleep(0)
        put(writer, b"c")
        sent.free.set()
        await writer.end(20)
        bodies = [message["body"] for message in sent if message["type"] == "http.response.body"]
        assert b"".join(bodies) == b"earlyabc"
        assert len(bodies) <= 4
        assert sent[-1]["more_body"] is False

    asyncio.run(main())


def test_send_beyond_the_bound_is_dropped_and_never_completes():
    async def main() -> None:
        sent = Sent()
        writer = SendWriter(sent, max_buffered_bytes=100)
        await writer.start()
        sent.free.clear()
        put(writer, b"x" * 50)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        put(writer, b"y" * 101)
        assert writer.dropped.done()
        await writer.end(20)
        assert len(sent) == 1

    asyncio.run(main())


def test_send_end_gives_up_at_its_deadline():
    async def main() -> None:
        sent = Sent()
        writer = SendWriter(sent, max_buffered_bytes=100)
        await writer.start()
        sent.free.clear()
        put(writer, b"x")
        await writer.end(0.01)
        assert writer.dropped.done()

    asyncio.run(main())


def test_writer_is_chosen_by_what_the_server_offers():
    async def main() -> None:
        direct = stream_writer({"extensions": {DIRECT_WRITE: FakeConnection()}}, Sent(), max_buffered_bytes=1)
        assert isinstance(direct, DirectWriter)
        for scope in ({}, {"extensions": {}}):
            assert isinstance(stream_writer(scope, Sent(), max_buffered_bytes=1), SendWriter)

    asyncio.run(main())
