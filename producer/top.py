"""``swathe top``: the whole fleet on a terminal, from Redis alone."""

import time
from typing import Final

from redis import Redis
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from producer.crew import Crew, Spark, Worker, crew_table, limit_words
from swathe import queue
from swathe.errors import QueueError

_EVERY_S: Final = 2.0


class Top:
    """Successive looks at the fleet."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._crew = Crew()
        self._spark = Spark()

    def look(self) -> RenderableType:
        """What to show now; an outage of Redis is shown, too."""
        try:
            return self._picture()
        except QueueError as error:
            return Text(str(error), "red")

    def _picture(self) -> RenderableType:
        names = queue.queue_names(self._connection)
        counts = {name: queue.RangeQueue(self._connection, name).counts() for name in names}
        said = queue.live_workers(self._connection)
        now_s = time.monotonic()
        lines = self._crew.look([Worker.of(name, about) for name, about in said.items()], now_s)
        self._spark.add(sum(line.worker.samples for line in lines), now_s)
        speed = sum(line.samples_s or 0.0 for line in lines)
        parts: list[RenderableType] = [
            Text(f"{name}  {count.queued} queued · {count.running} running"
                 f"{f' · {count.paused} paused' if count.paused else ''}"
                 f"{f' · {count.refused} refused' if count.refused else ''}")
            for name, count in counts.items()
        ]  # fmt: skip
        if not lines:
            return Group(*parts, Text("no workers; start some with: swathe-worker", "red"))
        parts += [
            Text(f"{len(lines)} workers · {speed:.1f} samples/s {self._spark}"),
            Text(f"limited by {limit_words(lines) or 'nothing known yet'}", "bold"),
            Text(),
            crew_table(lines),
        ]
        return Group(*parts)


def watch_fleet(connection: Redis, console: Console, *, once: bool) -> None:
    """Show the fleet until interrupted; once where nobody watches."""
    top = Top(connection)
    if once or not console.is_terminal:
        console.print(top.look())
        return
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(top.look(), refresh=True)
            time.sleep(_EVERY_S)
