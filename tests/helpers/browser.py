"""A headless Chromium, driven by its DevTools protocol over two pipes: no more is needed than the browser itself."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Chromium reads commands from the first and writes answers to the second.
COMMANDS_FD, ANSWERS_FD = 3, 4


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One page, shown in a browser that ends with the `with` block."""

    def __init__(self, url: str, profile: Path, *, width: int = 1400, height: int = 1000) -> None:
        program = find_chromium()
        assert program is not None
        command = [
            program,
            "--headless",
            # Without WebGL, which is slow without a GPU, TensorBoard draws its curves as SVG, where they can be read.
            "--disable-gpu",
            "--disable-3d-apis",
            "--no-sandbox",
            "--no-first-run",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()

        def set_descriptors() -> None:
            # Copies first: one of the four may have a number that another is to get.
            ends = os.dup(commands), os.dup(answers)
            os.dup2(ends[0], COMMANDS_FD)
            os.dup2(ends[1], ANSWERS_FD)

        log = (profile.parent / f"{profile.name}.log").open("wb")
        with log:
            # Only dup is called in the child; no lock can be held there.
            self._process = subprocess.Popen(
                command,
                preexec_fn=set_descriptors,  # noqa: PLW1509
                pass_fds=(COMMANDS_FD, ANSWERS_FD),
                stdout=log,
                stderr=log,
            )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        """What the browser has told unasked, of the domains that were enabled (`call("Log.enable")`)."""
        self._session: str | None = None
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "result" in answer, answer
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, expression: str) -> Any:
        """What JavaScript says on the page, as JSON can hold it."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str, holds: Callable[[Any], bool] = bool, timeout_s: float = 120.0) -> Any:
        """The value of `expression` as soon as it `holds`."""
        deadline = time.monotonic() + timeout_s
        while not holds(value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression}: {value}"
            time.sleep(0.2)
        return value

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser is gone"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer
