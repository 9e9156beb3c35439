package cpuprofile

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// place is a part of the packet path, defined by the names of its functions.
type place struct {
	name      string
	functions *regexp.Regexp
}

// Places outside the kernel, and the place of all other functions.
const (
	ByGenerator = "client and server, in user space"
	BySwitch    = "Open vSwitch, in user space"
	ByOthers    = "other processes of the machine"
	Elsewhere   = "system calls, and the rest of the kernel"
)

// places are the places of the kernel. A function counts for the first place that matches.
var places = []place{
	{"our programs", regexp.MustCompile(`^` + ofPrograms)},
	{"the programs' tables, helpers and hooks", regexp.MustCompile(
		`^(__)?(bpf|htab|lookup_nulls_elem|array_map|trie|longest_prefix|percpu_array|cls_bpf|tcf_|tc_run|tcx_|sch_handle|skb_do_redirect|dev_get_by_index_rcu|veth_peer_dev)`,
	)},
	{"VXLAN and tunnels of the kernel", regexp.MustCompile(`vxlan|tunnel|tun_dst|gro_cells|metadata_dst|udp_encap`)},
	{
		"packet sockets, taps and polling",
		regexp.MustCompile(
			`^(__|___)?(packet_|tpacket|tun_|tap_|do_sys_poll|do_poll|datagram_poll|pollwait|poll_|sock_poll|ep_|sys_(send|recv)m?msg|do_recvmmsg|copy_msghdr)`,
		),
	},
	{
		"IPv6, routes and neighbours",
		regexp.MustCompile(`ip6|ipv6|fib|rt6|^rt_|^nf_|inet6|neigh|icmpv6|addrconf|find_rr_leaf|dst_|raw6`),
	},
	{"UDP and sockets", regexp.MustCompile(`udp|^(__)?(sock|sk|inet)_|datagram|lock_sock|release_sock`)},
	{
		"devices and their queues",
		regexp.MustCompile(
			`veth|netif|napi|net_rx|net_tx|backlog|softirq|dev_|validate_xmit|eth_|qdisc|rps|xps|passthru`,
		),
	},
	{
		"packets' memory",
		regexp.MustCompile(
			`skb|kmem|kmalloc|^kfree|kvfree|slab|page|mem(cpy|set|move)|csum|copy_(from|to)|_copy|folio`,
		),
	},
	{
		"scheduler, wake-ups and locks",
		regexp.MustCompile(
			`sched|finish_task|_lock|_unlock|wake|ttwu|task|update_curr|entity|rcu|rseq|tsc|ktime|clock|timer|dequeue|enqueue|pick_|cpu|psi_|switch_`,
		),
	},
}

// PlaceOf returns the place of a kernel function.
func PlaceOf(function string) string {
	i := slices.IndexFunc(places, func(p place) bool { return p.functions.MatchString(function) })
	if i < 0 {
		return Elsewhere
	}
	return places[i].name
}

// PlaceNames are all places, in the order of reports.
func PlaceNames() []string {
	names := []string{ByGenerator, BySwitch}
	for _, p := range places {
		names = append(names, p.name)
	}
	return append(names, Elsewhere, ByOthers)
}

// Workers are the processes whose CPU time counts for a scenario, by process ID.
type Workers map[uint32]string // place of their time in user space

// ReadWorkers finds the kernel thread (ksoftirqd) that processes packets of a CPU outside of any process.
func ReadWorkers(cpu int) (Workers, error) {
	w := Workers{}
	all, err := filepath.Glob("/proc/[0-9]*/comm")
	for _, path := range all {
		text, gone := os.ReadFile(path)
		if gone != nil || strings.TrimSpace(string(text)) != fmt.Sprint("ksoftirqd/", cpu) {
			continue
		}
		pid, err := strconv.ParseUint(filepath.Base(filepath.Dir(path)), 10, 32)
		if err != nil {
			return nil, err
		}
		w[uint32(pid)] = Elsewhere
	}
	return w, err
}

// PlaceOf returns the place and the function of a sample.
func (w Workers) PlaceOf(i Sample, names Symbols) (place, function string) {
	user, ours := w[i.PID]
	switch {
	case !ours:
		return ByOthers, ByOthers
	case i.Address < KernelFrom:
		return user, user
	}
	function = names.Name(i.Address)
	return PlaceOf(function), function
}
