package accelerate_test

import (
	"context"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate"
)

// change is a change of the overlay, or of the daemon. While it is in force it may keep datagrams of some flows from
// their receivers.
type change struct {
	name string
	// key is of what is changed: one change with a key is in force at a time.
	key        string
	apply, end func() error
	blocks     func(f *dualFlow, way int) bool // nil: none
	silent     bool                            // without an event
	since      time.Duration                   // when it came into force
	node       *node
	address    *pod // whose entries an operator would evict
}

func (c *change) keeps(f *dualFlow, way int) bool { return c.blocks != nil && c.blocks(f, way) }

// lines returns a function that runs commands in the node.
func (n *node) lines(format string, args ...any) func() error {
	return func() error { return run(n.ns, fmt.Sprintf(format, args...)) }
}

// leaves tells whether a flow's datagrams of this way leave a node to the other one.
func (f *dualFlow) leaves(n *node, way int) bool { return f.sender(way).node == n }

func (f *dualFlow) sender(way int) *pod {
	if way == there {
		return f.client
	}
	return f.server
}

func (f *dualFlow) receiver(way int) *pod { return f.sender(1 - way) }

// kind is a kind of changes. make returns a random one, or nil if this arrangement has none.
type kind struct {
	name   string
	make   func(m *model) *change
	silent bool
}

// changes are all kinds but procedures, which contain one of these.
var changes = []kind{
	{"nftables rule", func(m *model) *change { return m.rule("iptables-nft", false) }, false},
	{"legacy rule", func(m *model) *change { return m.rule("iptables-legacy", true) }, true},
	{"VTEP gone", (*model).vtepGone, false},
	{"VTEP moves", (*model).vtepMoves, false},
	{"neighbour", (*model).neighbour, false},
	{"gateway", (*model).gatewayRoute, false},
	{"route", (*model).route, false},
	{"policy rule", (*model).policyRule, false},
	{"link down", (*model).linkDown, false},
	{"bridge port", (*model).bridgePort, false},
	{"pod", (*model).podGone, false},
	{"MTU", (*model).mtu, false},
	{"filter", (*model).filter, false},
}

func (m *model) node() *node { return m.nodes[m.random.IntN(2)] }
func (m *model) pod() *pod   { return m.pods[m.random.IntN(len(m.pods))] }

func (m *model) peer(n *node) *node { return m.nodes[2-n.number] }

func (m *model) rule(program string, silent bool) *change {
	f, way, n := m.flows[m.random.IntN(len(m.flows))], m.random.IntN(ways), m.node()
	match := fmt.Sprintf("FORWARD -p udp -s %v -d %v --sport %s --dport %s -j DROP", f.sender(way).addr,
		f.receiver(way).addr, f.ports(f.sender(way)), f.ports(f.receiver(way)))
	return &change{
		key: fmt.Sprint(program, n.number, f.number, way), node: n, silent: silent, address: f.server,
		apply: n.lines("! %s -w -I %s", program, match), end: n.lines("! %s -w -D %s", program, match),
		blocks: func(other *dualFlow, w int) bool { return other == f && w == way },
	}
}

// noVTEP is an address that no node has.
const noVTEP = "192.0.2.77"

// vtep returns an underlay address of a node, which has two.
func (n *node) vtep(second bool) string {
	if second {
		return fmt.Sprintf("192.0.2.1%d", n.number)
	}
	return fmt.Sprintf("192.0.2.%d", n.number)
}

func (m *model) vtepGone() *change {
	n := m.node()
	peer := m.peer(n)
	to := func(vtep string) func() error {
		return n.lines("! bridge fdb replace %s dev %s dst %s", peer.mac, n.overlay, vtep)
	}
	return &change{
		key: fmt.Sprint("fdb", n.number), node: n, address: m.podOf(peer),
		apply: to(noVTEP), end: to(peer.vtep(false)),
		blocks: func(f *dualFlow, way int) bool { return f.leaves(n, way) },
	}
}

// vtepMoves has the other node answer at its other address only.
func (m *model) vtepMoves() *change {
	n := m.node()
	peer := m.peer(n)
	to := func(second bool) func() error {
		return func() error {
			m.moved[peer] = second
			const drop = "! iptables-nft -w -%s INPUT -p udp -d %s -j DROP\n"
			err := run(peer.ns, fmt.Sprintf(drop, "D", peer.vtep(second))+fmt.Sprintf(drop, "A", peer.vtep(!second)))
			if err != nil {
				return err
			}
			return n.lines("! bridge fdb replace %s dev %s dst %s", peer.mac, n.overlay, peer.vtep(second))()
		}
	}
	return &change{
		key: fmt.Sprint("fdb", n.number), node: n, address: m.podOf(peer), apply: to(true), end: to(false),
	}
}

func (m *model) neighbour() *change {
	n := m.node()
	peer := m.peer(n)
	to := func(mac string) func() error {
		return n.lines("neigh replace %s lladdr %s dev %s nud permanent", peer.gateway, mac, n.overlay)
	}
	return &change{
		key: fmt.Sprint("neighbour", n.number), node: n, address: m.podOf(peer),
		apply: to("02:00:00:00:00:99"), end: to(peer.mac),
		blocks: func(f *dualFlow, way int) bool { return f.leaves(n, way) },
	}
}

// gatewayRoute leads the route to a gateway that does not exist.
func (m *model) gatewayRoute() *change {
	n := m.node()
	peer := m.peer(n)
	to := func(gateway string) func() error {
		return n.lines("route replace %s via %s dev %s onlink", peer.prefix, gateway, n.overlay)
	}
	return &change{
		key: fmt.Sprint("gateway", n.number), node: n, address: m.podOf(peer),
		apply: to("10.99.9.9"), end: to(peer.gateway),
		blocks: func(f *dualFlow, way int) bool { return f.leaves(n, way) },
	}
}

// route leads the route to one pod nowhere.
func (m *model) route() *change {
	n, p := m.node(), m.pod()
	c := &change{
		key: fmt.Sprint("route", n.number, p.addr), node: n, address: p,
		apply: n.lines("route add blackhole %v/32", p.addr), end: n.lines("route del blackhole %v/32", p.addr),
		blocks: func(f *dualFlow, way int) bool { return f.receiver(way) == p },
	}
	if p.node == n && n.device == "cali" { // it has such a route
		c.key = p.key()
		c.apply = n.lines("route del %v dev %s", p.addr, p.device)
		c.end = n.lines("route add %v dev %s scope link", p.addr, p.device)
	}
	return c
}

// policyRule uses table 99, which leads nowhere.
func (m *model) policyRule() *change {
	n, p := m.node(), m.pod()
	return &change{
		key: fmt.Sprint("rule", n.number, p.addr), node: n, address: p,
		apply:  n.lines("rule add to %v lookup 99", p.addr),
		end:    n.lines("rule del to %v lookup 99", p.addr),
		blocks: func(f *dualFlow, way int) bool { return f.receiver(way) == p },
	}
}

func (p *pod) key() string { return fmt.Sprint("pod", p.node.number, p.device) }

func (p *pod) has(f *dualFlow, _ int) bool { return f.client == p || f.server == p }

func (m *model) linkDown() *change {
	p := m.pod()
	up := p.node.lines("link set %s up", p.device)
	if p.node.device == "cali" {
		up = p.node.lines("link set %s up\nroute add %v dev %[1]s scope link", p.device, p.addr)
	}
	return &change{
		key: p.key(), node: p.node, address: p, apply: p.node.lines("link set %s down", p.device), end: up,
		blocks: p.has,
	}
}

func (m *model) bridgePort() *change {
	p := m.pod()
	if p.node.device == "cali" {
		return nil
	}
	return &change{
		key: p.key(), node: p.node, address: p, apply: p.node.lines("link set %s nomaster", p.device),
		end: p.node.lines("link set %s master cni0", p.device), blocks: p.has,
	}
}

func (m *model) podGone() *change {
	p := m.pod()
	return &change{
		key: p.key(), node: p.node, address: p, blocks: p.has,
		apply: func() error { return p.stop(m.flows) }, end: func() error { return p.start(m.flows) },
	}
}

func (m *model) mtu() *change {
	n := m.node()
	return &change{
		key: fmt.Sprint("mtu", n.number), node: n,
		apply: n.lines("link set %s mtu %d", n.overlay, n.mtu-50),
		end:   n.lines("link set %s mtu %d", n.overlay, n.mtu),
	}
}

// filter drops what a pod sends, at the node's side of its veth.
func (m *model) filter() *change {
	p := m.pod()
	apply := func() error {
		h, err := p.node.ns.Netlink()
		if err != nil {
			return err
		}
		defer h.Close()
		l, err := h.LinkByName(p.device)
		if err != nil {
			return err
		}
		of := netlink.QdiscAttrs{
			LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		}
		if err := h.QdiscAdd(&netlink.Clsact{QdiscAttrs: of}); err != nil {
			return err
		}
		return h.FilterAdd(filterOf(l, m.dropping))
	}
	return &change{
		key: p.key(), node: p.node, address: p, apply: apply,
		end:    p.node.lines("! tc qdisc del dev %s clsact", p.device),
		blocks: func(f *dualFlow, way int) bool { return f.sender(way) == p },
	}
}

// Points of an operator's procedure at which the daemon may be killed.
var points = []string{"before pause", "before evict", "before the change", "before resume", "after resume"}

// procedure makes another change as an operator does: pause, evict, change, resume. At a random point the daemon is
// killed.
func (m *model) procedure() *change {
	var c *change
	for c == nil || c.address == nil || c.silent {
		c = changes[m.random.IntN(len(changes))].make(m)
	}
	point, apply := m.random.IntN(len(points)+1), c.apply
	c.name = "procedure, killed " + append(points, "never")[point]
	c.apply = func() error {
		d := m.daemons[c.node.number-1]
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		for i, step := range []func() error{
			func() error { _, err := d.Pause(ctx); return err },
			func() error { _, err := d.Evict(ctx, accelerate.EvictRequest{Address: c.address.addr}); return err },
			apply,
			func() error { _, err := d.Resume(ctx); return err },
			func() error { return nil },
		} {
			if i == point {
				d.end(unix.SIGKILL)
				m.killed = c.node
			}
			if i == 2 || i < point {
				if err := step(); err != nil {
					return fmt.Errorf("%s: %w", points[i], err)
				}
			}
		}
		return nil
	}
	return c
}
