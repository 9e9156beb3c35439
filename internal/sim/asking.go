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
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/network"
)

// Nodes that ask are agents as of NIMITZ's first generation (NIMITZ §4.1): their streams tell of no mappings, and after
// each event each of them asks once what has changed since the last time. They are those of the set-up. Nodes that come
// later list everything and are told the rest, as ours are.

// ask has every node that asks do so.
func (w *world) ask(ctx context.Context, s step) error {
	asking := slices.DeleteFunc(slices.Clone(w.nodes), func(n *node) bool { return !n.asks })
	if s.setUp {
		return w.acquaint(ctx, asking)
	}
	w.progress.begin(s.String()+", then the others ask", len(asking))
	return w.each(ctx, asking, func(ctx context.Context, n *node) error {
		if err := n.ask(ctx); err != nil {
			return fmt.Errorf("node %s asks what has changed: %w", n.name, err)
		}
		return nil
	})
}

// acquaint has nodes know what the others were given in the set-up. One node of each tenant lists it, and the others'
// switches get a copy that nobody sent: of 25,000 nodes that each listed the others these would be 625 million
// mappings, of which the paper counts none.
func (w *world) acquaint(ctx context.Context, nodes []*node) error {
	revisions := map[string]int64{}
	all, of := map[string]bitset{}, map[string]map[netip.Prefix][]int{} // mappings by tenant; and by the node that has them
	for _, n := range nodes {
		for _, name := range n.nimitz.names() {
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
		for _, name := range n.nimitz.names() {
			n.told.know(name, all[name], of[name][n.told.node])
		}
		for _, revision := range revisions {
			if n.asked == 0 || revision < n.asked {
				n.asked = revision
			}
		}
	}
	return nil
}

// names are the tenants that a switch has.
func (s *nimitzSwitch) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.tenants))
}

// know is Replace by all there are but these.
func (n *nimitzNetwork) know(name string, all bitset, own []int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	remote := slices.Clone(all)
	for _, at := range own {
		remote.set(at, false)
	}
	n.tenants[name].remote = remote
}

// awaitList waits until the node's agent has listed a tenant since it hosts it: what it asks for afterwards is newer.
func (n *node) awaitList(ctx context.Context, name string) error {
	for !n.told.hasHeard(name) {
		if err := pause(ctx, noticeEvery); err != nil {
			return fmt.Errorf("node %s has not listed tenant %s: %w", n.name, name, err)
		}
	}
	return nil
}

func (n *nimitzNetwork) hasHeard(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.heard[name]
}

// ask asks once for each of the node's tenants what has changed. What the orchestrator has forgotten is listed anew.
func (n *node) ask(ctx context.Context) error {
	now := int64(0)
	for _, name := range n.nimitz.names() {
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
	said, err := n.query(ctx, &pilasterv1.ListMappingsRequest{Tenant: name, AfterRevision: n.asked})
	if connect.CodeOf(err) == connect.CodeAborted {
		list, revision, err := n.list(ctx, name)
		if err != nil {
			return 0, err
		}
		return revision, n.told.Replace(ctx, name, list)
	}
	if err != nil {
		return 0, err
	}
	added, err := mappingsOf(said.Mappings)
	if err != nil {
		return 0, err
	}
	var ended []network.Mapping
	for _, m := range said.EndedMappings {
		to, err := netip.ParsePrefix(m.To)
		if err != nil {
			return 0, err
		}
		ended = append(ended, network.Mapping{Tenant: m.Tenant, To: to})
	}
	return said.Revision, n.told.Apply(ctx, name, added, ended)
}

// list asks for all mappings of a tenant, page by page.
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

// query waits as long as the orchestrator wants it to, as agents do, and asks again where it did not answer. What it
// answered too late counts as asked, too.
func (n *node) query(
	ctx context.Context,
	req *pilasterv1.ListMappingsRequest,
) (*pilasterv1.ListMappingsResponse, error) {
	for {
		resp, err := n.clients.ListMappings(n.as(ctx), connect.NewRequest(req))
		if err == nil {
			return resp.Msg, nil
		}
		long, ok := agent.RetryAfter(err)
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

func mappingsOf(said []*pilasterv1.Mapping) ([]network.Mapping, error) {
	all := make([]network.Mapping, len(said))
	for i, m := range said {
		var err error
		if all[i], err = agent.MappingFromProto(m); err != nil {
			return nil, err
		}
	}
	return all, nil
}
