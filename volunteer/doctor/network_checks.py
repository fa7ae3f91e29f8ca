"""The network: where this machine can be reached, who has reached it, and whom it can reach.

Runs in: the command line. Nothing outside is asked but the peers in `bootstrap`, at the addresses
that the owner gave. Whether a router lets others in shows by who has dialled us.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import psutil

from p2p.address_scope import Scope, scope_of
from p2p.addresses import Address, parse_address
from volunteer.config import Config
from volunteer.doctor.check import Check, Level, LookError, within
from volunteer.doctor.facts import AgentFacts

EXAMPLE_PORT = 4001
_SHARED = ipaddress.ip_network("100.64.0.0/10")
"""Of providers that put many customers behind one address (RFC 6598)."""
_FIX_LISTEN = f"allmende config set listen /ip4/0.0.0.0/tcp/{EXAMPLE_PORT}"
_FIX_BOOTSTRAP = "allmende config unset bootstrap"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """What this machine says of its network."""

    hosts: tuple[str, ...]
    """Numeric addresses of the interfaces that are up, loopback and link-local ones left out; first
    the one that leads to the internet."""
    unreachable: tuple[tuple[str, str], ...]
    """(address of `bootstrap`, why nobody answers there)."""
    taken: tuple[tuple[str, str], ...]
    """(address of `listen`, why it cannot be listened on); empty while an agent runs."""


def network_checks(
    facts: NetworkFacts,
    agent: AgentFacts | None,
    config: Config,
    *,
    is_agent_silent: bool = False,
) -> list[Check]:
    """Return every check of the network.

    Args:
        facts: of this machine.
        agent: what the running agent says; None: none runs, or it does not answer.
        config: the owner's wishes.
        is_agent_silent: whether one runs that does not answer: where it listens is not known.
    """
    listens = [parse_address(a) for a in (agent.listen_addrs if agent else config.listen)]
    checks = [
        _addresses(facts, {addr.family for addr in listens}),
        *([] if is_agent_silent else _listen(facts, agent, config)),
        *_bootstrap(facts, config),
    ]
    if is_agent_silent:
        text = "who is connected, only the agent knows, and it does not answer"
        return [*checks, _check("note", "peers", "-", text)]
    if agent is None:
        text = "who is connected, and who has reached this machine, only the agent knows"
        return [*checks, _check("note", "agent", "not running", text, "allmende start")]
    checks.append(_peers(agent, config))
    checks.append(_reached(facts, agent, config))
    if agent.differing_peers:
        text = "peers that speak another version of the protocol; `allmende peers` says who updates"
        count = sum(agent.differing_peers.values())
        checks.append(_check("note", "versions", f"{count} differ", text, "allmende peers"))
    if agent.num_banned:
        text = "peers that broke rules are refused; the log names them"
        checks.append(_check("note", "refused", str(agent.num_banned), text, "allmende logs"))
    if agent.host_restarts:
        text = "times that the network layer failed and was started again; the log says why"
        checks.append(_check("note", "restarts", str(agent.host_restarts), text, "allmende logs"))
    return checks


def _check(level: Level, name: str, value: str, meaning: str, fix: str = "") -> Check:
    return Check(area="network", name=name, level=level, value=value, meaning=meaning, fix=fix)


def _addresses(facts: NetworkFacts, families: Collection[str]) -> Check:
    if not facts.hosts:
        text = "no interface is up: it trains alone, and exchanges nothing"
        return _check("wrong", "addresses", "none", text, "nmcli networking on")
    value = ", ".join(facts.hosts[:3]) + (", ..." if len(facts.hosts) > 3 else "")
    if _has_global_host(facts, families):
        text = "one of them can be reached from the whole internet, where no firewall forbids it"
        return _check("well", "addresses", value, text)
    if any(_is_shared(host) for host in facts.hosts):
        text = "your provider shares its address: no port can be opened; dialling out works"
        return _check("well", "addresses", value, text)
    return _check("well", "addresses", value, "of a local network, behind a router")


def _has_global_host(facts: NetworkFacts, families: Collection[str]) -> bool:
    """Tell whether the internet can reach an address of a kind that is listened on."""
    return any(
        scope_of(host) is Scope.GLOBAL and ("ip6" if ":" in host else "ip4") in families
        for host in facts.hosts
    )


def _is_shared(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    return ip.version == 4 and ip in _SHARED


def _listen(facts: NetworkFacts, agent: AgentFacts | None, config: Config) -> list[Check]:
    if agent is not None:
        if not agent.listen_addrs:
            text = "it accepts nobody, and only dials out"
            return [_check("note", "listening", "nowhere", text, _FIX_LISTEN)]
        ports = sorted({parse_address(addr).port for addr in agent.listen_addrs})
        value = f"port {', '.join(map(str, ports))}"
        scopes = {scope_of(parse_address(addr).host) for addr in agent.listen_addrs}
        if scopes == {Scope.LOOPBACK}:
            text = "on this machine alone: nobody else can dial it"
            return [_check("note", "listening", value, text, "allmende config unset listen")]
        return [_check("well", "listening", value, "on " + _hosts_of(agent.listen_addrs))]
    if facts.taken:
        return [
            _check("wrong", "listening", addr, f"cannot be listened on: {why}", _FIX_LISTEN)
            for addr, why in facts.taken
        ]
    if not config.listen:
        text = "it would accept nobody, and only dial out"
        return [_check("note", "listening", "nowhere", text, _FIX_LISTEN)]
    return [_check("well", "listening", ", ".join(config.listen), "it could listen there")]


def _hosts_of(addrs: Sequence[str]) -> str:
    hosts = list(dict.fromkeys(parse_address(addr).host for addr in addrs))
    return ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")


def _bootstrap(facts: NetworkFacts, config: Config) -> list[Check]:
    why = dict(facts.unreachable)
    return [
        _check("wrong", "bootstrap", addr, f"nobody answers there: {why[addr]}", _FIX_BOOTSTRAP)
        if addr in why
        else _check("well", "bootstrap", addr, "somebody answers there")
        for addr in config.bootstrap
    ]


def _peers(agent: AgentFacts, config: Config) -> Check:
    num_peers = agent.num_inbound + agent.num_outbound
    if num_peers:
        value = f"{agent.num_inbound} in, {agent.num_outbound} out"
        return _check("well", "peers", value, "connected now: who dialled us, and whom we dialled")
    known = f"; {agent.num_known_peers} are known and tried" if agent.num_known_peers else ""
    text = f"it trains alone, which is no fault{known}. To meet others, name one of them"
    fix = "allmende config set bootstrap /ip4/HOST/tcp/PORT/p2p/PEER_ID"
    return _check("note", "peers", "none", text, "" if config.bootstrap else fix)


def _reached(facts: NetworkFacts, agent: AgentFacts, config: Config) -> Check:
    """Say from where peers have dialled us, and what would let more of them."""
    dialled = agent.dialled_us_by_scope
    if num_times := dialled.get("global", 0):
        text = "peers have dialled this machine over the internet: it can be reached"
        return _check("well", "reached", f"{num_times} from outside", text)
    counts = f"{dialled.get('private', 0)} from this network" if dialled.get("private") else "never"
    if not agent.listen_addrs:
        return _check("note", "reached", counts, "it listens nowhere", _FIX_LISTEN)
    return _check("note", "reached", counts, *_router_advice(facts, agent, config))


def _router_advice(facts: NetworkFacts, agent: AgentFacts, config: Config) -> tuple[str, str]:
    """Return (what it means, the step that helps) where nobody came from outside."""
    nobody = "nobody from outside has dialled this machine yet; what it dials itself works"
    port = parse_address(agent.listen_addrs[0]).port
    if _has_global_host(facts, {parse_address(addr).family for addr in agent.listen_addrs}):
        return f"{nobody}. A firewall may stand in the way", f"sudo ufw allow {port}/tcp"
    if any(_is_shared(host) for host in facts.hosts):
        return f"{nobody}: your provider lets nobody in", ""
    if all(parse_address(addr).port == 0 for addr in config.listen):
        return f"{nobody}. A router needs a port that stays the same", _FIX_LISTEN
    host = next((host for host in facts.hosts if ":" not in host), "this machine")
    step = f"in your router, forward TCP port {port} to {host}"
    return f"{nobody}: others have to be able to dial one side of each connection", step


def read_network(config: Config, *, is_agent_running: bool) -> NetworkFacts:
    """Look at this machine's interfaces, ports and bootstrap peers; some seconds at most."""
    bootstrap = [(addr, _problem(_try_dial, parse_address(addr))) for addr in config.bootstrap[:8]]
    listen = [] if is_agent_running else [parse_address(addr) for addr in config.listen]
    taken = [(str(address), _problem(_try_listen, address)) for address in listen if address.port]
    return NetworkFacts(
        hosts=_read_hosts(),
        unreachable=tuple((addr, why) for addr, why in bootstrap if why),
        taken=tuple((addr, why) for addr, why in taken if why),
    )


def _read_hosts() -> tuple[str, ...]:
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    found = [
        address.address.partition("%")[0]
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name in up and address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    ips = [ipaddress.ip_address(host) for host in found]
    hosts = [str(ip) for ip in ips if not ip.is_loopback and not ip.is_link_local]
    first = _own_host()
    return tuple(sorted(hosts, key=lambda host: host != first))


def _own_host() -> str:
    """Return the address from which this machine would speak to the internet; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:  # no way there
            return ""
        return str(probe.getsockname()[0])


def _problem(attempt: Callable[[Address], None], address: Address) -> str:
    try:
        within(lambda: attempt(address))
    except LookError as error:
        return str(error)
    return ""


def _try_dial(address: Address) -> None:
    with socket.create_connection((address.host, address.port), timeout=2.5):
        pass


def _try_listen(address: Address) -> None:
    family = socket.AF_INET6 if address.family == "ip6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address.host, address.port))
