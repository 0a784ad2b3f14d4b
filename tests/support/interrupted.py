"""A process that counts how often Ctrl-C reaches it: ``python -m experiments.launch … THIS``."""

import signal
import time


def main() -> None:
    counted = []
    signal.signal(signal.SIGINT, lambda *_: counted.append(time.monotonic()))
    print("ready", flush=True)
    end_s = time.monotonic() + 60
    while not counted and time.monotonic() < end_s:
        time.sleep(0.02)
    time.sleep(0.3)  # a second one would come now
    print(f"interrupted {len(counted)} times", flush=True)


if __name__ == "__main__":
    main()
