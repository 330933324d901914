"""Random calls by a process and by workers that it forks meanwhile, which use the client that their parent has open.

``racing_workers.py URL SETTINGS MESSAGES WORKERS SEED FOLDER``; the parent closes its client before workers are done.
Each leaves a file of JSON with what it was told: see :meth:`tests.integration.test_client_races.Race.shown`.
"""

import asyncio
import json
import os
import random
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.integration.test_client_races import Race

from postdate import Client, connect


def make_calls(client: Client, url: str, messages: int, seed: str, file: Path) -> None:
    race = Race(client, url, random.Random(seed), file.stem)
    asyncio.run(race.run(messages, transactions=url.startswith("postgres")))
    file.write_text(json.dumps(race.shown(), default=str))


def forked(client: Client, url: str, messages: int, seed: str, file: Path) -> int:
    """Fork a worker; return its number. By chance its work is that of a child of its own."""
    if worker := os.fork():
        return worker
    try:
        if random.Random(seed).random() < 0.3:
            _, status = os.waitpid(forked(client, url, messages, f"{seed}-", file), 0)
            os._exit(os.waitstatus_to_exitcode(status))
        make_calls(client, url, messages, seed, file)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the end of a worker must not be that of its parent
        traceback.print_exc()
    os._exit(1)


def main(url: str, settings: dict[str, Any], messages: int, workers: int, seed: str, folder: Path) -> int:
    client, chance = connect(url, **settings), random.Random(seed)
    client.blocking.list(limit=1)
    thread = threading.Thread(target=make_calls, args=(client, url, messages, seed, folder / "parent.json"))
    thread.start()
    running = list[int]()
    for number in range(workers):
        threading.Event().wait(chance.random() * 0.2)
        running.append(forked(client, url, messages, f"{seed}-{number}", folder / f"worker-{number}.json"))
    thread.join()
    client.blocking.close()
    return sum(os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) != 0 for each in running)


if __name__ == "__main__":
    address, settings, messages, workers, seed, folder = sys.argv[1:]
    sys.exit(main(address, json.loads(settings), int(messages), int(workers), seed, Path(folder)))
