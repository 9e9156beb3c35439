package accelerate_test

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/oncache"
)

// TestModelNotices shows that the judge notices a cache whose entries a change does not evict: datagrams arrive that
// the overlay drops, and others are lost for longer.
func TestModelNotices(t *testing.T) {
	seed := number(t, "PILASTER_ACCELERATE_SEED", rand.Uint64())
	t.Logf("PILASTER_ACCELERATE_SEED=%d repeats the choices", seed)
	var caches [2]*oncache.Cache
	m := newModel(t, flannel, seed, func(m *model) {
		for i, n := range m.nodes {
			caches[i] = n.cacheOnly(t)
		}
	})
	m.step(t, &change{name: "start", node: m.nodes[0], apply: func() error { return nil }}, false)
	m.active = nil
	for _, c := range []struct{ kind, fault string }{
		{"nftables rule", "datagrams arrive with the cache, the last one"},
		{"pod", "later than over the overlay alone"},
	} {
		kind := changes[slices.IndexFunc(changes, func(k kind) bool { return k.name == c.kind })]
		for attempt := 1; ; attempt++ { // the change may come when the entries are about to expire
			m.faults = nil
			made := m.make(kind)
			m.step(t, made, false)
			m.step(t, made, true)
			if found := strings.Join(m.faults, "\n"); strings.Contains(found, c.fault) {
				t.Log(found)
				break
			}
			if attempt == 5 {
				t.Fatalf("%s: the judge found %q, want %q", c.kind, m.faults, c.fault)
			}
		}
	}
	// Hits of other flows do not hide that these miss.
	for i, n := range m.nodes {
		for _, p := range m.pods {
			if p.node == n {
				must(t, n.use(p.device, caches[i].Leave))
			}
		}
		must(t, n.use("veth1", caches[i].Join))
	}
	before, hits := m.uses(t), hitsOf(t, caches)
	m.load(t)
	for end := time.Now().Add(time.Minute); ; time.Sleep(interval) {
		if hitsOf(t, caches) > hits+1000 && m.arrivedSince(before) > 100 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d hits of the load, %d datagrams", hitsOf(t, caches)-hits, m.arrivedSince(before))
		}
	}
	if missing := m.uses(t).since(before).misses(t); len(missing) != len(m.flows)*int(ways) {
		t.Errorf("containers without the cache: got %q, want each flow", missing)
	}
}

func hitsOf(t *testing.T, caches [2]*oncache.Cache) (n uint64) {
	t.Helper()
	for _, c := range caches {
		s, err := c.Stats()
		must(t, err)
		n += s.Out.Hits + s.In.Hits
	}
	return n
}

// use calls f with a device and its index.
func (n *node) use(device string, f func(string, int) error) error {
	return n.ns.Do(func() error {
		d, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		return f(d.Name, d.Index)
	})
}

// cacheOnly uses the cache without the daemon, so that no change evicts anything.
func (n *node) cacheOnly(t *testing.T) *oncache.Cache {
	t.Helper()
	c := inside(t, n.ns, func() (*oncache.Cache, error) {
		return oncache.Open(oncache.Config{
			Uplink: "eth0", Device: n.overlay, Address: netip.MustParseAddr(n.vtep(false)), VNI: 1, Port: 8472,
			Tracks: true, TTL: 8 * time.Second,
		})
	})
	for host := 3; host < 5; host++ {
		must(t, n.use(fmt.Sprint(n.device, host), c.Join))
	}
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		for !isClosed(stop) {
			if err := c.Renew(); err != nil {
				done <- err
				return
			}
			time.Sleep(100 * time.Millisecond)
		}
		done <- c.Close()
	}()
	t.Cleanup(func() {
		close(stop)
		must(t, <-done)
	})
	return c
}
