"""A private D-Bus daemon, and services on it that answer what a test says.

The daemon is the real one; a service is a thread that owns a name and answers calls by a table.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jeepney import (
    HeaderFields,
    Message,
    MessageType,
    message_bus,
    new_error,
    new_method_return,
)
from jeepney.io.blocking import DBusConnection, open_dbus_connection

Answer = tuple[str, tuple[Any, ...]]
"""(signature, values)."""
UNKNOWN_METHOD = "org.freedesktop.DBus.Error.UnknownMethod"


@contextlib.contextmanager
def private_bus(folder: Path) -> Iterator[str]:
    """Yield the address of a bus of our own; skip the test where there is no daemon."""
    program = shutil.which("dbus-daemon")
    if program is None:
        pytest.skip("needs Debian's package dbus-daemon")
    address = f"unix:path={folder / 'bus'}"
    daemon = subprocess.Popen(
        [program, "--session", "--nofork", "--print-address", f"--address={address}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith("unix:"), "it listens"
        yield address
    finally:
        daemon.terminate()
        daemon.wait(10)
        assert daemon.stdout is not None
        daemon.stdout.close()


class Service:
    """One owner of names; `answers` may be changed while it runs."""

    def __init__(self, address: str, *names: str) -> None:
        self.answers: dict[tuple[str, str], Answer | Callable[..., Answer]] = {}
        """(path, member) -> answer, or what makes it from the call's values."""
        self.is_hung = False
        self.calls: list[tuple[str, str]] = []
        self._connection: DBusConnection = open_dbus_connection(address, enable_fds=True)
        for name in names:
            reply = self._connection.send_and_get_reply(message_bus.RequestName(name), timeout=5)
            assert reply.body == (1,), f"{name} is owned already"
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def set_property(self, path: str, name: str, signature: str, value: object) -> None:
        """Answer `Get` for a property, in any interface."""
        self.answers[path, f"Get {name}"] = ("v", ((signature, value),))

    def set_all(self, path: str, values: dict[str, tuple[str, object]]) -> None:
        """Answer `GetAll` for an object."""
        self.answers[path, "GetAll"] = ("a{sv}", (values,))

    def close(self) -> None:
        """Leave the bus."""
        os.write(self._wake_write, b".")
        self._thread.join(10)
        self._connection.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _serve(self) -> None:
        sock = self._connection.sock
        while self._wake_read not in select.select([sock, self._wake_read], [], [])[0]:
            for message in self._received():
                if message.header.message_type is MessageType.method_call and not self.is_hung:
                    self._connection.send(self._reply_to(message))

    def _received(self) -> list[Message]:
        messages = []
        with contextlib.suppress(TimeoutError):
            while True:
                messages.append(self._connection.receive(timeout=0))
        return messages

    def _reply_to(self, message: Message) -> Message:
        fields = message.header.fields
        path, member = fields[HeaderFields.path], fields[HeaderFields.member]
        self.calls.append((path, member))
        if member == "Get":
            member = f"Get {message.body[1]}"
        answer = self.answers.get((path, member))
        if answer is None:
            return new_error(message, UNKNOWN_METHOD)
        signature, values = answer(*message.body) if callable(answer) else answer
        return new_method_return(message, signature or None, values)


@contextlib.contextmanager
def serving(address: str, *names: str) -> Iterator[Service]:
    """Yield a service that owns `names`."""
    service = Service(address, *names)
    try:
        yield service
    finally:
        service.close()
