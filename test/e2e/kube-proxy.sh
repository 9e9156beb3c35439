#!/bin/bash
# kube-proxy.sh: a peer of `pilaster bench services` (docs/howto/benchmark-peer.md): routed containers, and services by
# the nftables rules of kube-proxy on the client's node. KUBE_PROXY is the path of test/e2e/kubeproxy, built. By its other
# names it has 10,000 services, or the client is a host outside, which connects to a node port of a node without the
# endpoint.
set -eu
on() { local ns=$1; shift; nsenter --net="$ns" -- "$@"; }
port=5201 service=fd00:73::1 node_port=30080

case $1 in
up)
    for i in 1 2; do
        node=BENCH_NODE_$i container=BENCH_CONTAINER_$i other=BENCH_ADDRESS_$((3 - i))
        on "${!node}" sysctl -qw net.ipv6.conf.all.forwarding=1
        on "${!node}" ip link add c0 type veth peer name eth0 netns "${!container}"
        on "${!node}" ip address add "fd00:$i::1/64" dev c0 nodad
        on "${!node}" ip link set c0 up
        on "${!container}" ip address add "fd00:$i::2/64" dev eth0 nodad
        on "${!container}" ip link set eth0 up
        on "${!container}" ip route add default via "fd00:$i::1"
        on "${!node}" ip route add "fd00:$((3 - i))::/64" via "${!other}"
    done
    services=1
    [[ $0 != *-10000* ]] || services=10000
    options=(-services $services -first "$service" -backend fd00:2::2 -target $port)
    if [[ $0 = *-node-port* ]]; then
        # The client is outside: not one of the pods, and its node is the one with the port.
        on "$BENCH_NODE_1" "$KUBE_PROXY" "${options[@]}" -node fd00:1::1 -node-port $node_port -pods fd00:99::/64 >&2
        echo "[fd00:2::2]:$port [fd00:1::1]:$node_port"
    else
        on "$BENCH_NODE_1" "$KUBE_PROXY" "${options[@]}" -node "$BENCH_ADDRESS_1" -pods fd00:1::/64 >&2
        echo "[fd00:2::2]:$port [$service]:80"
    fi
    ;;
down) ;;
esac
