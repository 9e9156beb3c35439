package soak_test

import (
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/modules/evpn"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/packet"
)

// turnOver chooses a name at random. It removes the container with this name if there is one; otherwise it adds one.
func (s *soak) turnOver() {
	name := fmt.Sprint("c", s.random.IntN(containers))
	if s.up[name] != nil {
		s.remove(name)
		return
	}
	s.add(lab.Container{
		Name: name, Node: s.pick(nodes), Tenant: s.pick(tenants),
		Labels: map[string]string{"app": fmt.Sprint("app", s.random.IntN(4))},
	})
}

func (s *soak) add(c lab.Container) {
	s.must(s.lab.AddContainer(s.Context(), c))
	status, err := s.lab.Container(c.Name)
	s.must(err)
	got, err := s.lab.Agent(c.Node).GetEndpoint(s.Context(),
		connect.NewRequest(&pilasterv1.GetEndpointRequest{Key: s.lab.ContainerID(c.Name)}))
	s.must(err)
	s.did("add", "%s of %s on %s", c.Name, c.Tenant, c.Node)
	s.answered("id of a new container", got.Msg.Endpoint.TenantId, s.current[c.Tenant], "%+v", status)
	var node netip.Addr // on networks with mappings the node has none
	if !hasMappings {
		node, err = netip.ParseAddr(got.Msg.Endpoint.NodeAddress)
		s.must(err)
	}
	s.up[c.Name] = &container{status, got.Msg.Endpoint.TenantId, node}
}

func (s *soak) remove(name string) {
	c := s.up[name]
	s.must(s.lab.RemoveContainer(s.Context(), name))
	s.released[name] = c.Address
	s.gone[name] = removed{c.Node, c.Tenant, c.Plaintext}
	if hasMappings {
		s.gone[name] = removed{c.Node, c.Tenant, c.Address}
	}
	delete(s.up, name)
	s.did("remove", "%s of %s on %s", name, c.Tenant, c.Node)
	s.retire(c.Tenant)
}

// retire removes the IDs without containers from the model.
func (s *soak) retire(tenant string) {
	s.live[tenant] = slices.DeleteFunc(s.live[tenant], func(id uint32) bool {
		used := len(s.names(func(c *container) bool { return c.Tenant == tenant && c.id == id })) > 0
		if used || id == s.current[tenant] {
			return false
		}
		s.retired[tenant] = append(s.retired[tenant], id)
		s.did("id retired", "%d of %s", id, tenant)
		return true
	})
}

func (s *soak) killAgent() { s.kill("kill agent", lab.AgentProcess(s.pick(nodes))) }

func (s *soak) killOrchestrator() { s.kill("kill orchestrator", lab.Orchestrator) }

func (s *soak) kill(kind, process string) {
	s.did(kind, "%s", process)
	_, err := s.lab.Kill(s.Context(), process)
	s.must(err)
}

// rotate gives a tenant a new key, and often also kills a process.
func (s *soak) rotate() {
	tenant := s.pick(tenants)
	id := s.newID(tenant)
	if id == 0 {
		return
	}
	switch s.random.IntN(3) {
	case 0:
		s.killAgent()
	case 1:
		s.killOrchestrator()
	}
	s.rotated(tenant, id)
}

// newID requests a new key and returns its ID, or 0 if the tenant has the maximum number of IDs.
func (s *soak) newID(tenant string) uint32 {
	resp, err := s.lab.Operator().RotateKey(s.Context(), connect.NewRequest(&pilasterv1.RotateKeyRequest{Name: tenant}))
	if len(s.live[tenant]) == 4 {
		s.did("rotate refused", "%s", tenant)
		s.answered("refusal", err != nil && strings.Contains(err.Error(), "has 4 ids"), true,
			"rotate %s with ids %v: %v", tenant, s.live[tenant], err)
		return 0
	}
	s.must(err)
	s.did("rotate", "%s to %d", tenant, resp.Msg.Id)
	return resp.Msg.Id
}

// exhaust gives a tenant containers with the maximum number of IDs, and then requests another ID.
func (s *soak) exhaust() {
	tenant := s.pick(tenants)
	for {
		if others := s.names(func(c *container) bool { return c.Tenant != tenant }); len(s.up) == containers &&
			len(others) > 0 {
			s.remove(others[0])
		}
		for i := range containers {
			if name := fmt.Sprint("c", i); s.up[name] == nil {
				s.add(lab.Container{Name: name, Node: s.pick(nodes), Tenant: tenant})
				break
			}
		}
		s.compareIDs()
		id := s.newID(tenant)
		if id == 0 {
			return
		}
		s.rotated(tenant, id)
		if len(s.names(func(c *container) bool { return c.Tenant == tenant })) == containers {
			return // all containers are of this tenant, and have fewer IDs
		}
	}
}

// heldUp checks that nodes allocate no addresses with a new ID while a hosting node cannot receive the ID.
func (s *soak) heldUp(tenant string, id uint32) bool {
	hosts := s.names(func(c *container) bool { return c.Tenant == tenant && slices.Contains(s.away, c.Node) })
	if len(hosts) == 0 {
		return false
	}
	s.did("rotate delayed", "%s to %d, by the node of %s", tenant, id, hosts[0])
	for range 5 {
		time.Sleep(100 * time.Millisecond) // there is no event to wait for
		ids := s.tenant(tenant).Tenant.Ids
		last := ids[len(ids)-1]
		s.answered("id delayed", last.Id == id && last.OnlyAccepted, true, "%s has %v", tenant, ids)
	}
	return true
}

// rotated updates the model after all nodes have accepted a new ID.
func (s *soak) rotated(tenant string, id uint32) {
	s.live[tenant] = append(s.live[tenant], id)
	s.current[tenant] = id
	s.retire(tenant)
	s.compareIDs()
}

// flap sets a node's uplink down and later up, and adds the addresses and routes again, as a network manager does.
func (s *soak) flap() {
	node := s.pick(nodes)
	s.did("flap", "uplink of %s", node)
	s.command(node, "ip", "link", "set", lab.Uplink, "down")
	s.dropped, s.away, s.down = []string{node}, []string{node}, []string{node}
	s.compareReach()
	s.command(node, "ip", "link", "set", lab.Uplink, "up")
	link := 1 + slices.Index(nodes, node)
	s.command(node, "ip", "-6", "addr", "replace", fmt.Sprintf("2001:db8:70:%x::2/64", link), "dev", lab.Uplink,
		"nodad")
	router := fmt.Sprintf("2001:db8:70:%x::1", link)
	s.command(node, "ip", "-6", "route", "replace", "default", "via", router)
	if onEVPN {
		s.command(node, "ip", "route", "replace", tunnels.String(), "via", "inet6", router, "dev", lab.Uplink)
	}
	s.heal(node)
}

// cutOff makes the fabric drop a node's packets.
func (s *soak) cutOff() {
	node := s.pick(nodes)
	s.did("cut off", "%s", node)
	rule := []string{"iif", node, "priority", "900", "blackhole"}
	s.command(lab.Router, append([]string{"ip", "-6", "rule", "add"}, rule...)...)
	s.command(lab.Router, append([]string{"ip", "-4", "rule", "add"}, rule...)...)
	s.dropped, s.away = []string{node}, []string{node}
	s.during(node)
	s.command(lab.Router, append([]string{"ip", "-6", "rule", "del"}, rule...)...)
	s.command(lab.Router, append([]string{"ip", "-4", "rule", "del"}, rule...)...)
	s.heal(node)
}

// partition disconnects a node only from the orchestrator: containers still exchange packets.
func (s *soak) partition() {
	node := s.pick(nodes)
	s.did("partition", "%s", node)
	rule := []string{"iif", node, "to", "2001:db8:70::/64", "priority", "900", "blackhole"}
	s.command(lab.Router, append([]string{"ip", "-6", "rule", "add"}, rule...)...)
	s.away = []string{node}
	s.during(node)
	s.command(lab.Router, append([]string{"ip", "-6", "rule", "del"}, rule...)...)
	s.heal(node)
}

// during makes changes while a node cannot reach the orchestrator.
func (s *soak) during(node string) {
	if hasMappings { // tenants have no keys, and the cluster allocates addresses
		s.compareReach()
		return
	}
	tenant := s.pick(tenants)
	var announced uint32
	if len(s.live[tenant]) < 4 {
		resp, err := s.lab.Operator().RotateKey(s.Context(),
			connect.NewRequest(&pilasterv1.RotateKeyRequest{Name: tenant}))
		s.must(err)
		announced = resp.Msg.Id
		s.did("rotate", "%s to %d", tenant, announced)
		if !s.heldUp(tenant, announced) {
			s.rotated(tenant, announced)
			announced = 0
		}
	}
	if here := s.names(func(c *container) bool { return c.Node == node }); len(here) > 0 && len(s.up) < containers {
		// The node allocates from its cached state, without the orchestrator.
		like := s.up[here[0]]
		for i := range containers {
			if name := fmt.Sprint("c", i); s.up[name] == nil {
				s.add(lab.Container{Name: name, Node: node, Tenant: like.Tenant, Labels: like.Labels})
				break
			}
		}
	}
	s.compareReach()
	if announced != 0 {
		s.live[tenant] = append(s.live[tenant], announced)
		s.current[tenant] = announced // after the node reconnects
		s.retire(tenant)
	}
}

// heal waits until a node is connected again in both directions.
func (s *soak) heal(node string) {
	s.dropped, s.away, s.down = nil, nil, nil
	ns, err := s.lab.Namespace(node)
	s.must(err)
	defer ns.Close()
	router, err := s.lab.Namespace(lab.Router)
	s.must(err)
	defer router.Close()
	s.must(ns.WaitUp(s.Context(), lab.Uplink))
	s.must(router.WaitUp(s.Context(), node))
	for i, other := range nodes {
		if other == node {
			continue
		}
		s.eventually(func() string {
			// The other node may still have neighbour entries from before the flap.
			if s.pings(node, i+1) && s.pings(other, 1+slices.Index(nodes, node)) {
				return ""
			}
			return fmt.Sprintf("%s and %s do not reach each other on the fabric", node, other)
		})
	}
}

// pings pings the underlay address of a link from a node.
func (s *soak) pings(from string, link int) bool {
	ns, err := s.lab.Namespace(from)
	s.must(err)
	defer ns.Close()
	r, err := packet.Ping(s.Context(), ns, farSide(link), packet.PingOptions{Timeout: 300 * time.Millisecond})
	return err == nil && r.Received > 0
}

// reset removes a node's containers, resets and deletes the node, and lets its machine join as a new node with another
// prefix.
func (s *soak) reset() {
	node := s.pick(nodes)
	for _, name := range s.names(func(c *container) bool { return c.Node == node }) {
		s.remove(name)
	}
	was := s.prefix(node)
	s.must(s.lab.Stop(s.Context(), lab.AgentProcess(node)))
	folder := filepath.Join(s.lab.Folder(), "nodes", node)
	ns, err := s.lab.Namespace(node)
	s.must(err)
	defer ns.Close()
	out, err := resetCommand(ns, s.binary, "--state-dir", filepath.Join(folder, "state"), "--run-dir",
		filepath.Join(folder, "run"), "--bpffs", s.lab.BPF(node))
	if err != nil {
		s.Fatalf("reset of %s: %v\n%s", node, err, out)
	}
	s.eventually(func() string { // the node's stream may not have ended yet
		_, err := s.lab.Operator().DeleteNode(s.Context(),
			connect.NewRequest(&pilasterv1.DeleteNodeRequest{Name: node}))
		if err != nil {
			return err.Error()
		}
		return ""
	})
	s.must(s.lab.Start(s.Context(), lab.AgentProcess(node)))
	s.did("reset", "%s", node)
	now := s.prefix(node)
	s.answered("prefix of a new node", now != was, true, "%s had %s, now has %s", node, was, now)
	via := farSide(1 + slices.Index(nodes, node)).String()
	for _, p := range [][2]string{{was, now}, {s.locator(was).String(), s.locator(now).String()}} {
		s.command(lab.Router, "ip", "-6", "route", "del", p[0])
		s.command(lab.Router, "ip", "-6", "rule", "del", "iif", node, "from", p[0])
		s.command(lab.Router, "ip", "-6", "route", "replace", p[1], "via", via)
		s.command(lab.Router, "ip", "-6", "rule", "add", "iif", node, "from", p[1], "lookup", "main", "priority",
			"1000")
		if !onILA {
			break
		}
	}
	if onEVPN {
		old, own := s.vtep(was).String(), s.vtep(now).String()
		s.command(lab.Router, "ip", "route", "del", old)
		s.command(lab.Router, "ip", "rule", "del", "iif", node, "from", old)
		s.command(lab.Router, "ip", "route", "replace", own, "via", "inet6", via, "dev", node)
		s.command(lab.Router, "ip", "rule", "add", "iif", node, "from", own, "lookup", "main", "priority", "1000")
	}
}

// tunnels has the nodes' tunnel addresses of network evpn in labs.
var tunnels = evpn.Pool{}.Prefix()

// vtep returns the tunnel address of a node with a prefix.
func (s *soak) vtep(prefix string) netip.Addr {
	number := address.DefaultPlan().NodeNumber(netip.MustParsePrefix(prefix))
	a, ok := address.VTEP4(tunnels, number)
	if !ok {
		s.Fatalf("%v has no address for node %d", tunnels, number)
	}
	return a
}

// ila is the use of addresses by network ila in labs.
var ila, _ = address.DefaultPlan().ILA()

// locator returns the locator of a node with a prefix.
func (s *soak) locator(prefix string) netip.Prefix {
	l, err := ila.Locator(netip.MustParsePrefix(prefix))
	s.must(err)
	return l
}

func resetCommand(ns *netns.Namespace, binary string, flags ...string) ([]byte, error) {
	cmd := exec.Command(binary, append([]string{"node", "reset", "--yes"}, flags...)...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	err := ns.Run(cmd)
	return []byte(out.String()), err
}

func (s *soak) prefix(node string) string {
	got, err := s.lab.Operator().GetNode(s.Context(), connect.NewRequest(&pilasterv1.GetNodeRequest{Name: node}))
	s.must(err)
	return got.Msg.Node.Prefix
}

func (s *soak) command(in string, argv ...string) {
	s.Helper()
	_, err := s.lab.Output(s.Context(), in, argv...)
	s.must(err)
}
