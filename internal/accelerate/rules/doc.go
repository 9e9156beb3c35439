// Package rules reads the netfilter rules of the network namespace and finds those whose verdict is not a function of
// a packet's addresses, ports, devices, mark and conntrack state. A cache that repeats the verdict of an earlier packet
// of the flow would make such rules ineffective. It reads nftables by netlink, which shows the rules of iptables-nft
// too, and those of iptables-legacy by iptables-legacy-save.
//
// Packets that may be learnt from have bits of the cache in their mark. Rules, also routing rules, that compare these
// bits are found too.
//
// Rules that only chains of type nat reach are accepted: netfilter asks these chains for the first packet of a
// connection only. kube-proxy's rules with statistic or numgen are of this kind.
package rules
