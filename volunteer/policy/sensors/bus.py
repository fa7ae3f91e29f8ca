"""Calls over D-Bus, with a deadline, that start nothing.

Runs in: agent. One connection for one thread, kept open, and opened again after a failure.
"""

from __future__ import annotations

import time
from typing import Any

from jeepney import DBusAddress, HeaderFields, MessageFlag, MessageType, new_method_call
from jeepney.io.blocking import DBusConnection, open_dbus_connection

from volunteer.policy.sensors.watcher import SensorError

CALL_TIMEOUT_S = 0.7
BUDGET_S = 1.8
"""For all calls of one reading together."""
_NOT_THERE = (
    "org.freedesktop.DBus.Error.ServiceUnknown",
    "org.freedesktop.DBus.Error.NameHasNoOwner",
    "org.freedesktop.DBus.Error.UnknownMethod",
    "org.freedesktop.DBus.Error.UnknownObject",
    "org.freedesktop.DBus.Error.UnknownInterface",
    "org.freedesktop.DBus.Error.UnknownProperty",
    "org.freedesktop.DBus.Error.InvalidArgs",
    "org.freedesktop.DBus.Error.NotSupported",
)


class NotThereError(SensorError):
    """Nobody offers this on the bus."""


class Bus:
    """One bus."""

    def __init__(self, address: str, *, with_files: bool = False) -> None:
        """Talk to the bus at `address`, perhaps with file descriptors as answers."""
        self._address = address
        self._with_files = with_files
        self._connection: DBusConnection | None = None
        self._until_s = 0.0

    def begin(self) -> None:
        """Begin one reading: its calls share BUDGET_S."""
        self._until_s = time.monotonic() + BUDGET_S

    def call(
        self, address: DBusAddress, method: str, signature: str = "", *arguments: object
    ) -> tuple[Any, ...]:
        """Call a method and return its answer.

        Raises:
            NotThereError: nobody offers it.
            SensorError: no bus, no answer in time, or an error as the answer.
        """
        message = new_method_call(address, method, signature or None, arguments)
        message.header.flags |= MessageFlag.no_auto_start
        timeout_s = min(CALL_TIMEOUT_S, self._until_s - time.monotonic())
        if timeout_s <= 0:
            raise SensorError(f"the bus has not answered within {BUDGET_S:g} s")
        try:
            connection = self._connected()
            reply = connection.send_and_get_reply(message, timeout=timeout_s)
        except FileNotFoundError as error:
            self.close()
            raise NotThereError("there is no such bus") from error
        except TimeoutError as error:
            self.close()  # its late answer must not be taken for another one
            raise SensorError(f"{address.bus_name} has not answered in time") from error
        except (OSError, ValueError, RuntimeError) as error:
            self.close()
            raise SensorError(str(error)) from error
        if reply.header.message_type is MessageType.error:
            name = reply.header.fields.get(HeaderFields.error_name, "an error")
            told = f"{address.bus_name} answers {name}"
            raise NotThereError(told) if name in _NOT_THERE else SensorError(told)
        return tuple(reply.body)

    def get(self, address: DBusAddress, name: str) -> Any:  # noqa: ANN401 - D-Bus has variants
        """Return a property."""
        (value,) = self.call(_properties(address), "Get", "ss", address.interface, name)
        return value[1]

    def get_all(self, address: DBusAddress) -> dict[str, Any]:
        """Return all properties of an interface."""
        (values,) = self.call(_properties(address), "GetAll", "s", address.interface)
        return {name: value for name, (_, value) in values.items()}

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> DBusConnection:
        if self._connection is None:
            self._connection = open_dbus_connection(
                self._address, enable_fds=self._with_files, auth_timeout=CALL_TIMEOUT_S
            )
        return self._connection


def _properties(address: DBusAddress) -> DBusAddress:
    return DBusAddress(address.object_path, address.bus_name, "org.freedesktop.DBus.Properties")
