"""How the parts of libp2p are put together: what is on, what is off, how much. Runs in: agent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost, _IdentifyNotifee
from libp2p.host.ping import ID as PING_PROTOCOL
from libp2p.host.ping import handle_ping
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, PROTOCOL_ID_V12
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader

from p2p.admission import Admission
from p2p.conduct import Misdeed
from p2p.gossip_guards import MAX_SUBSCRIPTIONS_PER_PEER, GuardedPubsub
from p2p.gossip_packing import PACKED_PROTOCOL, PackingHost
from p2p.gossip_router import GuardedGossipSub
from p2p.guarded_yamux import GuardedYamux
from p2p.guards import GuardedSwarm
from p2p.identity import Identity
from p2p.swarm_types import SwarmConfig

CONNECTIONS_PER_PEER: Final = 3  # both may dial at once; none is closed for it
GOSSIP_RPC_BYTES: Final = 256 << 10


def new_network(
    identity: Identity,
    config: SwarmConfig,
    *,
    is_banned: Callable[[str], bool],
    note_misdeed: Callable[[str, Misdeed], None],
) -> GuardedSwarm:
    """Make what dials and listens: TCP, noise, yamux, and nothing else."""
    key_pair = create_new_key_pair(identity._private_seed)
    peer_store = PeerStore()
    peer_store.add_key_pair(ID.from_pubkey(key_pair.public_key), key_pair)
    noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
    network = GuardedSwarm(
        ID.from_pubkey(key_pair.public_key),
        peer_store,
        # Fault 5: noise alone. The default also speaks plaintext, in which anybody is anybody.
        TransportUpgrader({NOISE_PROTOCOL: noise}, {TProtocol(YAMUX_PROTOCOL): GuardedYamux}),
        transports=[TCP()],
        # Strangers cannot take every slot: a quarter is left for those whom we dial.
        admission=Admission(
            max_open=max(1, config.max_connections * 3 // 4),
            max_per_ip=config.max_inbound_per_ip,
            max_from_loopback=config.max_inbound_from_loopback,
        ),
        handshake_timeout_s=config.handshake_timeout_s,
        is_banned=is_banned,
        note_misdeed=note_misdeed,
        retry_config=RetryConfig(max_retries=0),
        connection_config=ConnectionConfig(
            max_connections=config.max_connections,
            high_watermark=config.max_connections,
            low_watermark=0,
            min_connections=0,
            max_connections_per_peer=CONNECTIONS_PER_PEER,
            auto_connect_interval=3600.0,
        ),
    )
    network.ping_every_s = config.ping_every_s
    network.ping_timeout_s = config.ping_timeout_s
    return network


def new_basic_host(network: GuardedSwarm) -> BasicHost:
    """Make what negotiates protocols on streams.

    No identify: it tells strangers our addresses and stores theirs, and runs in trio's system
    nursery, where an exception ends the program.
    """
    libp2p_host = PackingHost(network, default_protocols=OrderedDict({PING_PROTOCOL: handle_ping}))
    network.notifees[:] = [one for one in network.notifees if not isinstance(one, _IdentifyNotifee)]
    return libp2p_host


def new_pubsub(
    libp2p_host: BasicHost,
    *,
    on_sent: Callable[[str, int], None],
    on_received: Callable[[str, int], None],
    note_misdeed: Callable[..., None],
) -> GuardedPubsub:
    """Make the publish-subscribe service; its router is a service too."""
    router = GuardedGossipSub(
        protocols=[PACKED_PROTOCOL, PROTOCOL_ID_V12, PROTOCOL_ID_V11],
        # With six, seven copies of each message came; what is lost comes by other ways as well.
        degree=3,
        degree_low=2,
        degree_high=4,
        heartbeat_interval=1,  # the default of 120 s leaves the mesh broken for as long
        max_messages_per_topic_per_second=50,  # counts one's own too
        adaptive_gossip_enabled=False,
        eclipse_protection_enabled=False,  # grafts everybody where three networks are not to be had
        max_pending_messages_per_peer=8,
        do_px=False,
    )
    return GuardedPubsub(
        libp2p_host,
        router,
        strict_signing=True,
        max_inbound_rpc_size=GOSSIP_RPC_BYTES,
        max_subscriptions_per_peer=MAX_SUBSCRIPTIONS_PER_PEER,
        on_sent=on_sent,
        on_received=on_received,
        note_misdeed=note_misdeed,
    )
