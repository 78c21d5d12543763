"""A relay that passes bytes on late: this kernel has no other way to slow a link.

python relay.py LISTEN_HOST:PORT TARGET_HOST:PORT DELAY_S
"""

from __future__ import annotations

import asyncio
import sys


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Every piece arrives `delay_s` after it was sent, in order; as much may be under way as is sent in that time."""
    loop, under_way = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

    async def deliver() -> None:
        while True:
            due, piece = await under_way.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not piece:
                writer.close()
                return
            writer.write(piece)
            await writer.drain()

    delivery = asyncio.create_task(deliver())
    try:
        while piece := await reader.read(65536):
            under_way.put_nowait((loop.time() + delay_s, piece))
    except ConnectionError:
        pass
    under_way.put_nowait((loop.time() + delay_s, b""))
    await asyncio.gather(delivery, return_exceptions=True)


async def main(listen: str, target: str, delay_s: float) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = target.partition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, far_writer, delay_s), carry(far_reader, writer, delay_s))

    host, _, port = listen.partition(":")
    server = await asyncio.start_server(accept, host, int(port))
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
