package datapath

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// frontWire is four nodes on one link: a sender's, the backend, and two frontends. Their containers are of tenant 7.
type frontWire struct {
	nodes    []*testNode
	switches []*Nimitz
}

// Nodes of a frontWire.
const (
	ofSender = iota
	ofBackend
	ofFront1
	ofFront2
	frontNodes
)

const frontOffload, frontEpoch = 77, 0xfeed

func newFrontWire(t testing.TB) *frontWire {
	t.Helper()
	w := &frontWire{}
	hub := namespace(t, "hub")
	h, err := hub.Netlink()
	must(t, err)
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "hub", 9000
	must(t, h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
	bridge, err := h.LinkByName("hub")
	must(t, err)
	must(t, h.LinkSetUp(bridge))
	for i := range frontNodes {
		n := &testNode{
			ns:       namespace(t, fmt.Sprint("node", i)),
			prefix:   netip.MustParsePrefix(fmt.Sprintf("fd70:696c:6100:%d::/64", i+1)),
			underlay: netip.MustParseAddr(fmt.Sprintf("2001:db8:70::%d", i+1)),
			reserve:  tenant.OffloadOverhead,
		}
		w.nodes = append(w.nodes, n)
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Index, attrs.MasterIndex, attrs.MTU = fmt.Sprint("port", i), 100+i, bridge.Attrs().Index, 9000
		pair := netlink.NewVeth(attrs)
		pair.PeerName, pair.PeerNamespace = "eth0", netlink.NsFd(n.ns.FD())
		must(t, h.LinkAdd(pair))
		port, err := h.LinkByName(attrs.Name)
		must(t, err)
		must(t, h.LinkSetUp(port))
	}
	for i, n := range w.nodes {
		n.configure(t, w.nodes[(i+1)%frontNodes])
		for j := 2; j < frontNodes; j++ {
			peer := w.nodes[(i+j)%frontNodes]
			must(t, n.ns.Do(func() error {
				return netlink.RouteAdd(&netlink.Route{
					Dst: &net.IPNet{IP: peer.prefix.Addr().AsSlice(), Mask: net.CIDRMask(64, 128)},
					Gw:  peer.underlay.AsSlice(),
				})
			}))
		}
	}
	for i, n := range w.nodes {
		must(t, n.ns.WaitUp(t.Context(), "eth0"))
		n.open(t, endpoint.Veth)
		s, err := n.datapath.Nimitz()
		must(t, err)
		w.switches = append(w.switches, s)
		entries := []pipeline.Entry{pipeline.Peer{Nodes: netip.MustParsePrefix("fd70:696c:6100::/48")}}
		for j, peer := range w.nodes {
			for _, to := range overlay(j + 1) {
				if i != j {
					entries = append(entries, pipeline.Forward{
						VNI: 7, To: to, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(peer.prefix),
					})
				}
			}
		}
		must(t, s.Apply(t.Context(), nil, entries))
	}
	return w
}

func (w *frontWire) add(t testing.TB, node int, host byte) *testContainer {
	return w.nodes[node].addOverlay(t, w.switches[node], node+1, 7, host)
}

// offload makes all nodes use the frontends for the backend's containers.
func (w *frontWire) offload(t testing.TB, asks bool, containers ...*testContainer) {
	t.Helper()
	o := pipeline.Offload{ID: frontOffload, VNI: 7, Backend: w.nodes[ofBackend].prefix, Epoch: frontEpoch}
	o.To = [8]netip.Prefix{w.nodes[ofFront1].prefix, w.nodes[ofFront2].prefix}
	copy(o.From[:], o.To[:])
	for i, s := range w.switches {
		e := o
		e.Fronts = i == ofFront1 || i == ofFront2
		entries := []pipeline.Entry{e}
		if i == ofBackend {
			entries = append(entries, pipeline.Backend{VNI: 7, Offload: frontOffload, Asks: asks})
		} else {
			for _, to := range overlay(ofBackend + 1) {
				entries = append(entries, pipeline.Forward{
					VNI: 7, To: to, Port: pipeline.VXLAN, VTEP: pipeline.VTEP(o.Backend), Offload: frontOffload,
				})
			}
		}
		for _, c := range containers {
			if e.Fronts {
				for _, a := range c.record.Attachments {
					entries = append(entries, pipeline.Fronted{
						VNI: 7, Address: a.Address, Offload: frontOffload, App: 70,
					})
				}
			}
		}
		must(t, s.Apply(t.Context(), nil, entries))
	}
}

// rules makes a node accept TCP to port 80 and ICMP and UDP to all, or, for a backend without rules, nothing.
func (n *testNode) rules(t *testing.T, none bool) {
	t.Helper()
	if none {
		n.says(t, 10, 1, denies|ruleNothing, 0, 0)
	} else {
		n.says(t, 10, 1, accepts|ruleWeb, 81, denies|ruleMail)
	}
	n.says(t, 20, 1, accepts|ruleWeb, 0, 0)
	must(t, n.datapath.Objects.PolSubjectsV1.Put(
		bpfobj.PilasterPolTargetKey{Tenant: 7, App: appAny}, bpfobj.PilasterPolTarget{Sets: [2]uint64{20, 10}},
	))
	n.voidVerdicts(t)
}

func (w *frontWire) sent(t *testing.T, node int) (all [8]uint64) {
	t.Helper()
	for kind := range all {
		var per []uint64
		must(t, w.nodes[node].datapath.Objects.NimSentV1.Lookup(uint32(kind), &per))
		for _, n := range per {
			all[kind] += n
		}
	}
	return all
}

// connects reports whether a TCP connection to a port succeeds.
func connects(t *testing.T, from, to *testContainer, port int) bool {
	t.Helper()
	var l net.Listener
	must(t, to.ns.Do(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(to.seen(), uint16(port)).String())
		return err
	}))
	defer l.Close()
	var conn net.Conn
	var err error
	must(t, from.ns.Do(func() error {
		conn, err = (&net.Dialer{Timeout: impatience}).DialContext(t.Context(), "tcp", l.Addr().String())
		return nil
	}))
	if err != nil {
		return false
	}
	must(t, conn.SetDeadline(time.Now().Add(patience)))
	conn.Close()
	return true
}

// TestFrontends: packets to an offloaded container pass a frontend, whose rules decide, from containers of another
// node, of a frontend and of the backend itself; its own connections and their answers pass too (Nezha §3, NZ1, NZ2).
func TestFrontends(t *testing.T) {
	w := newFrontWire(t)
	hot, beside := w.add(t, ofBackend, 2), w.add(t, ofBackend, 3)
	far, near := w.add(t, ofSender, 2), w.add(t, ofFront1, 2)
	for i, n := range w.nodes {
		n.rules(t, i == ofBackend)
	}
	w.offload(t, true, hot, beside)
	for family := range 2 {
		hot, beside, far, near := hot.of(family), beside.of(family), far.of(family), near.of(family)
		for name, pair := range map[string][2]*testContainer{
			"from far": {far, hot}, "from a frontend": {near, hot}, "from beside": {beside, hot}, "to far": {hot, far},
			"to a frontend": {hot, near}, "to beside": {hot, beside},
		} {
			t.Run(fmt.Sprintf("%s %v", name, pair[1].seen()), func(t *testing.T) {
				from, to := pair[0], pair[1]
				mustReach(t, from, to, "ping")
				if !connects(t, from, to, 80) {
					t.Error("port 80 is closed")
				}
				if connects(t, from, to, 81) {
					t.Error("port 81 is open")
				}
				transfer(t, from, to, 4<<20)
				datagram(t, from, to, 100)
				datagram(t, from, to, 20000)
			})
		}
	}
	for i := range w.nodes {
		t.Logf("node %d sent %v, dropped %v", i, w.sent(t, i), w.nodes[i].drops(t))
	}
	for _, i := range []int{ofFront1, ofFront2} {
		if sent := w.sent(t, i); sent[1] == 0 || sent[4] == 0 {
			t.Errorf("frontend %d sent %v by kind, want pre-actions and answers", i, sent)
		}
	}
}
