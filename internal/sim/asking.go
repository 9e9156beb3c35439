package sim

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/control"
	"pilaster.io/pilaster/internal/network"
)

// A node with asks set is an agent of the first generation (NIMITZ §4.1): its stream carries no mappings, and it
// queries once after each event for the changes since its last query. All nodes of the set-up are such nodes. Nodes
// that join later list all mappings and receive changes on their streams, as our agents do.

// ask runs one query for changes on every querying node.
func (w *world) ask(ctx context.Context, s step) error {
	asking := slices.DeleteFunc(slices.Clone(w.nodes), func(n *node) bool { return !n.asks })
	if s.setUp {
		return w.seedMappings(ctx, asking)
	}
	w.progress.begin(s.String()+", then the other nodes query", len(asking))
	return w.each(ctx, asking, func(ctx context.Context, n *node) error {
		if err := n.ask(ctx); err != nil {
			return fmt.Errorf("node %s queries for changes: %w", n.name, err)
		}
		return nil
	})
}

// seedMappings gives the nodes the mappings that exist after the set-up. For each tenant, one node lists the mappings,
// and the switches of the other nodes get a copy without any message. If 25,000 nodes listed, they would receive 625
// million mappings, which the paper does not count.
func (w *world) seedMappings(ctx context.Context, nodes []*node) error {
	revisions := map[string]int64{}
	all, of := map[string]bitset{},
		map[string]map[netip.Prefix][]int{} // mappings by tenant; and by the node that has them
	for _, n := range nodes {
		for _, name := range n.mapped.names() {
			if err := n.awaitList(ctx, name); err != nil {
				return err
			}
			if revisions[name] != 0 {
				continue
			}
			list, revision, err := n.list(ctx, name)
			if err != nil {
				return fmt.Errorf("node %s lists tenant %s: %w", n.name, name, err)
			}
			var every bitset
			by := map[netip.Prefix][]int{}
			for _, m := range list {
				at := w.numbers.number(name, m.To)
				every.set(at, true)
				by[m.Node] = append(by[m.Node], at)
			}
			revisions[name], all[name], of[name] = revision, every, by
		}
	}
	for _, n := range nodes {
		for _, name := range n.mapped.names() {
			n.received.setRemote(name, all[name], of[name][n.received.node])
		}
		for _, revision := range revisions {
			if n.asked == 0 || revision < n.asked {
				n.asked = revision
			}
		}
	}
	return nil
}

// names returns the tenants of the switch, sorted.
func (s *mappedSwitch) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.tenants))
}

// setRemote replaces the remote mappings of a tenant by all mappings except the node's own.
func (n *mappedNetwork) setRemote(name string, all bitset, own []int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	remote := slices.Clone(all)
	for _, at := range own {
		remote.set(at, false)
	}
	n.tenants[name].remote = remote
}

// awaitList waits until the node's agent has listed the mappings of a hosted tenant. Queries for changes begin after
// this list.
func (n *node) awaitList(ctx context.Context, name string) error {
	for !n.received.hasListed(name) {
		if err := pause(ctx, noticeEvery); err != nil {
			return fmt.Errorf("node %s has not listed tenant %s: %w", n.name, name, err)
		}
	}
	return nil
}

func (n *mappedNetwork) hasListed(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.seen[name]
}

// ask queries once for the changes of each of the node's tenants. If the orchestrator has compacted the changes of a
// tenant, ask lists the tenant again.
func (n *node) ask(ctx context.Context) error {
	now := int64(0)
	for _, name := range n.mapped.names() {
		if err := n.awaitList(ctx, name); err != nil {
			return err
		}
		revision, err := n.askAbout(ctx, name)
		if err != nil {
			return err
		}
		if now == 0 || revision < now {
			now = revision
		}
	}
	n.asked = max(n.asked, now)
	return nil
}

func (n *node) askAbout(ctx context.Context, name string) (revision int64, err error) {
	response, err := n.query(ctx, &pilasterv1.ListMappingsRequest{Tenant: name, AfterRevision: n.asked})
	if connect.CodeOf(err) == connect.CodeAborted {
		list, revision, err := n.list(ctx, name)
		if err != nil {
			return 0, err
		}
		return revision, n.received.Replace(ctx, name, list)
	}
	if err != nil {
		return 0, err
	}
	added, err := mappingsOf(response.Mappings)
	if err != nil {
		return 0, err
	}
	var ended []network.Mapping
	for _, m := range response.EndedMappings {
		to, err := netip.ParsePrefix(m.To)
		if err != nil {
			return 0, err
		}
		ended = append(ended, network.Mapping{Tenant: m.Tenant, To: to})
	}
	return response.Revision, n.received.Apply(ctx, name, added, ended)
}

// list queries all mappings of a tenant, page by page.
func (n *node) list(ctx context.Context, name string) (list []network.Mapping, revision int64, err error) {
	for token := ""; ; {
		page, err := n.query(ctx, &pilasterv1.ListMappingsRequest{Tenant: name, PageToken: token})
		if err != nil {
			return nil, 0, err
		}
		some, err := mappingsOf(page.Mappings)
		if err != nil {
			return nil, 0, err
		}
		list = append(list, some...)
		if token = page.NextPageToken; token == "" {
			return list, page.Revision, nil
		}
	}
}

// query retries until the orchestrator answers, with the delay that the orchestrator demands, as agents do. The
// orchestrator also counts queries whose response arrives after the deadline.
func (n *node) query(
	ctx context.Context,
	req *pilasterv1.ListMappingsRequest,
) (*pilasterv1.ListMappingsResponse, error) {
	for {
		resp, err := n.clients.ListMappings(n.as(ctx), connect.NewRequest(req))
		if err == nil {
			return resp.Msg, nil
		}
		long, ok := control.RetryAfter(err)
		if code := connect.CodeOf(err); code == connect.CodeDeadlineExceeded || code == connect.CodeUnavailable {
			long, ok = againAfter, ctx.Err() == nil
		}
		if !ok {
			return nil, err
		}
		if err := pause(ctx, long+rand.N(long)); err != nil {
			return nil, err
		}
	}
}

func mappingsOf(response []*pilasterv1.Mapping) ([]network.Mapping, error) {
	all := make([]network.Mapping, len(response))
	for i, m := range response {
		var err error
		if all[i], err = control.MappingFromProto(m); err != nil {
			return nil, err
		}
	}
	return all, nil
}
