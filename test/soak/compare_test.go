package soak_test

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// compare runs all comparisons with the model.
func (s *soak) compare() {
	s.compareIDs()
	s.compareReach()
	s.compareReleased()
	s.compareEntries()
	s.compareMappings()
}

// compareMappings waits until each node has the mappings of the containers elsewhere of the tenants that it hosts, and
// no others. On network evpn a table also has the node's own containers, and the CIDRs of these tenants.
func (s *soak) compareMappings() {
	table := labtest.Network() + map[bool]string{true: "-forwarding", false: "-mappings"}[onEVPN]
	for _, node := range nodes {
		if !hasMappings || slices.Contains(s.away, node) {
			continue
		}
		want := 0
		for _, tenant := range tenants {
			here := len(s.names(func(c *container) bool { return c.Tenant == tenant && c.Node == node }))
			all := len(s.names(func(c *container) bool { return c.Tenant == tenant }))
			switch {
			case here > 0 && onEVPN:
				want += all + 1
			case here > 0:
				want += all - here
			}
		}
		s.eventually(func() string {
			if used := s.tables(node); used[table] != uint32(want) {
				return fmt.Sprintf("%s has %d entries in %s, want %d", node, used[table], table, want)
			}
			return ""
		})
		s.answers["mappings"]++
	}
}

// tables returns how many entries the tables of a node have.
func (s *soak) tables(node string) map[string]uint32 {
	status, err := s.lab.Agent(node).Status(s.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
	s.must(err)
	used := map[string]uint32{"endpoints": status.Msg.Endpoints}
	for _, e := range status.Msg.Datapath.Entries {
		used[e.Table] = e.Used
	}
	return used
}

// reaches is the model of the packet path. Two containers reach each other if they are of one tenant, unless they are
// on different nodes and the fabric drops the packets of one of these nodes.
func (s *soak) reaches(a, b *container) bool {
	connected := !slices.Contains(s.dropped, a.Node) && !slices.Contains(s.dropped, b.Node)
	return a.Tenant == b.Tenant && (a.Node == b.Node && !s.still(a.Node) || connected)
}

// still reports whether a node's containers cannot send because the uplink is down. This is the case for macvlans.
func (s *soak) still(node string) bool {
	return labtest.Device() == endpoint.Macvlan && slices.Contains(s.down, node)
}

func (s *soak) compareReach() {
	echoes, err := s.lab.PingAll(s.Context(), packet.PingOptions{Timeout: 500 * time.Millisecond})
	s.must(err)
	if want := len(s.up) * (len(s.up) - 1); len(echoes) != want {
		s.Errorf("got %d pairs of containers, want %d", len(echoes), want)
	}
	for _, e := range echoes {
		from, to := s.up[e.From], s.up[e.To]
		s.answered("reach", e.Reached(), s.reaches(from, to), "%+v to %+v", *from, *to)
	}
	s.compareNodes()
}

// compareNodes pings between nodes and containers. A node must reach only its own containers. No container must reach
// its node at the address that the container sees as the node's address.
func (s *soak) compareNodes() {
	type echo struct {
		from string
		to   netip.Addr
		must bool
		got  bool
	}
	var echoes []*echo
	for _, name := range s.names(func(*container) bool { return true }) {
		c := s.up[name]
		for _, node := range nodes {
			must := node == c.Node && !s.still(node) && !hasMappings
			echoes = append(echoes, &echo{from: node, to: c.Address, must: must})
		}
		if !hasMappings {
			echoes = append(echoes, &echo{from: name, to: c.node})
		}
	}
	group, ctx := errgroup.WithContext(s.Context())
	group.SetLimit(16)
	for _, e := range echoes {
		group.Go(func() error {
			ns, err := s.lab.Namespace(e.from)
			if err != nil {
				return err
			}
			defer ns.Close()
			wait := 300 * time.Millisecond
			if e.must {
				wait = 2 * time.Second
			}
			r, err := packet.Ping(ctx, ns, e.to, packet.PingOptions{Timeout: wait})
			e.got = err == nil && r.Received > 0 // it is also correct if there is no route
			return nil
		})
	}
	s.must(group.Wait())
	for _, e := range echoes {
		s.answered("reach of nodes", e.got, e.must, "%s to %v", e.from, e.to)
	}
}

// compareReleased pings released addresses. They must not respond, because their quarantine is longer than a round.
func (s *soak) compareReleased() {
	asking := s.names(func(*container) bool { return true })
	if len(asking) == 0 {
		return
	}
	ns, err := s.lab.Namespace(asking[0])
	s.must(err)
	defer ns.Close()
	for name, a := range s.released {
		// A container of a tenant with the other addressing has no route to the address, which is also correct.
		r, err := packet.Ping(s.Context(), ns, a, packet.PingOptions{Timeout: 50 * time.Millisecond})
		s.answered("released address", err == nil && r.Received > 0, false, "from %s to %v, which %s released",
			asking[0], a, name)
	}
}

// compareIDs waits until tenants have the IDs of the model, and all hosting nodes have the ID for allocations.
// Meanwhile the IDs of running containers must always exist.
func (s *soak) compareIDs() {
	for _, name := range tenants {
		s.eventually(func() string {
			now := s.tenant(name)
			var ids []uint32
			accepted := false
			for _, id := range now.Tenant.Ids {
				ids = append(ids, id.Id)
				accepted = id.OnlyAccepted
			}
			for _, c := range s.up {
				if c.Tenant == name && !slices.Contains(ids, c.id) {
					s.Fatalf("%s of %s has id %d, but the tenant has %v", c.Name, name, c.id, ids)
				}
			}
			if accepted || !slices.Equal(ids, s.live[name]) {
				return fmt.Sprintf("%s has ids %v, the last only accepted: %v; want %v", name, ids, accepted,
					s.live[name])
			}
			return s.missingIDs(name, now.Hosting)
		})
		s.answers["ids of a tenant"]++
	}
}

// missingIDs describes the first node that does not have the tenant's current IDs yet.
func (s *soak) missingIDs(tenant string, hosting []*pilasterv1.Hosting) string {
	hosts := map[string]bool{}
	for _, c := range s.up {
		hosts[c.Node] = hosts[c.Node] || c.Tenant == tenant
	}
	for _, h := range hosting {
		if !hosts[h.Node] {
			return fmt.Sprintf("%s hosts %s, which the model excludes", h.Node, tenant)
		}
		delete(hosts, h.Node)
		if slices.Contains(s.away, h.Node) {
			continue
		}
		if !slices.Contains(h.Holds, s.current[tenant]) || !slices.Equal(h.Accepts, s.live[tenant]) {
			return fmt.Sprintf("%s accepts %v and holds %v of %s, want %v and at least %d", h.Node, h.Accepts,
				h.Holds, tenant, s.live[tenant], s.current[tenant])
		}
	}
	for node, is := range hosts {
		if is && !slices.Contains(s.away, node) {
			return fmt.Sprintf("%s does not host %s, which the model requires", node, tenant)
		}
	}
	return ""
}

// compareEntries checks the number of table entries on nodes. A node must only have entries of its own containers (NP2,
// NP10), and one entry for each ID of their tenants.
func (s *soak) compareEntries() {
	for _, node := range nodes {
		here, ids, keys := 0, 0, 0
		for _, tenant := range tenants {
			n := len(s.names(func(c *container) bool { return c.Node == node && c.Tenant == tenant }))
			if here += n; n > 0 {
				ids += len(s.live[tenant])
				if tenant != "glass" {
					keys += len(s.live[tenant])
				}
			}
		}
		used := s.tables(node)
		all := map[string]int{"endpoints": here, "sources": here, "locals": here, "tenants": ids, "keys": keys}
		if hasMappings {
			own := labtest.Network() + map[bool]string{true: "-register", false: "-locals"}[onEVPN]
			all = map[string]int{"endpoints": here, own: here, "sources": 0, "locals": 0, "keys": 0}
		}
		for table, want := range all {
			s.answered("entries", used[table], want, "table %s of %s; all tables: %v", table, node, used)
		}
	}
}

// tenant returns a tenant from the orchestrator.
func (s *soak) tenant(name string) *pilasterv1.GetTenantResponse {
	got, err := s.lab.Operator().GetTenant(s.Context(), connect.NewRequest(&pilasterv1.GetTenantRequest{Name: name}))
	s.must(err)
	return got.Msg
}

// eventually waits until wrong returns nothing.
func (s *soak) eventually(wrong func() string) {
	s.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		what := wrong()
		if what == "" {
			return
		}
		if time.Now().After(end) {
			s.Fatalf("after %v: %s", patience, what)
		}
	}
}

// farSide returns the address of a node's uplink.
func farSide(link int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("2001:db8:70:%x::2", link))
}
