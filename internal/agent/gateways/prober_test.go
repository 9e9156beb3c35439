package gateways

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// bed is a node with egress rules, and its packet path.
type bed struct {
	rules    []Rule
	changed  chan struct{}
	prober   *Prober
	sent     map[netip.Prefix]int
	silent   map[netip.Prefix]bool // for all tenant ids
	without  map[key]bool          // a gateway without the rules of a tenant id
	answered map[key]time.Time
	dead     map[netip.Prefix]bool // for a tenant id
	deadTo   map[key]bool
	written  int
	since    time.Time // of the last write
	fail     error
}

func (b *bed) EgressGateways() []Rule           { return b.rules }
func (b *bed) GatewaysChanged() <-chan struct{} { return b.changed }

func (b *bed) ProbeGateway(node netip.Prefix, id address.TenantID) error {
	b.sent[node]++
	if k := (key{node, id}); !b.silent[node] && !b.without[k] && b.fail == nil {
		b.answered[k] = time.Now()
	}
	return b.fail
}

func (b *bed) GatewayAnswered(node netip.Prefix, id address.TenantID) (time.Duration, bool, error) {
	at, ok := b.answered[key{node, id}]
	return time.Since(at), ok, nil
}

func (b *bed) SetGatewayAlive(node netip.Prefix, id address.TenantID, alive bool) error {
	b.deadTo[key{node, id}], b.since = !alive, time.Now()
	b.dead[node] = false
	for k, dead := range b.deadTo {
		b.dead[node] = b.dead[node] || dead && k.node == node
	}
	b.written++
	return nil
}

func prefix(n byte) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 1, 7: n}), 64)
}

func gatewayOf(n byte) tenant.EgressGateway {
	return tenant.EgressGateway{Node: string(rune('a' + n)), Prefix: prefix(n)}
}

// TestProber: seven probes without an answer make a gateway dead if another one of a rule is not; an answer ends it.
func TestProber(t *testing.T) {
	own := byte(9)
	var first []Rule // of the first round
	run := func(name string, test func(t *testing.T, b *bed, after func(time.Duration, ...byte))) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := &bed{
					rules: first, changed: make(chan struct{}, 1), sent: map[netip.Prefix]int{},
					silent: map[netip.Prefix]bool{}, without: map[key]bool{}, answered: map[key]time.Time{},
					dead: map[netip.Prefix]bool{}, deadTo: map[key]bool{},
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				b.prober = New(b, b, prefix(own), slog.New(slog.DiscardHandler))
				go b.prober.Run(ctx)
				synctest.Wait()
				test(t, b, func(d time.Duration, want ...byte) {
					t.Helper()
					time.Sleep(d)
					synctest.Wait()
					for n := range own + 1 {
						if b.dead[prefix(n)] != slices.Contains(want, n) {
							t.Errorf("gateway %d is dead: %t", n, b.dead[prefix(n)])
						}
					}
				})
			})
		})
	}
	of := func(rules ...[]byte) (all []Rule) {
		for _, rule := range rules {
			r := Rule{Tenant: "blue", IDs: []address.TenantID{1}}
			for _, n := range rule {
				r.Via = append(r.Via, gatewayOf(n))
			}
			all = append(all, r)
		}
		return all
	}
	set := func(b *bed, rules ...[]byte) {
		b.rules = of(rules...)
		b.changed <- struct{}{}
		synctest.Wait()
	}
	run("probes", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		after(time.Minute)
		set(b, []byte{own})
		after(time.Minute)
		if len(b.sent) > 0 {
			t.Errorf("probes without another gateway: %v", b.sent)
		}
		set(b, []byte{1, 2}, []byte{2, own})
		after(time.Minute)
		for _, n := range []byte{1, 2} {
			if sent := b.sent[prefix(n)]; sent < 599 || sent > 601 {
				t.Errorf("%d probes of %d in a minute, want 600", sent, n)
			}
		}
		if b.written != 3 { // node 2 is silent until its first answer, because this node is the other one of its rule
			t.Errorf("%d writes about two gateways that answer", b.written)
		}
		set(b)
		sent := b.sent[prefix(1)]
		if after(time.Minute); b.sent[prefix(1)] != sent || len(b.prober.States()) > 0 {
			t.Errorf("without rules %d more probes, and states %v", b.sent[prefix(1)]-sent, b.prober.States())
		}
	})
	run("one fails", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		set(b, []byte{1, 2})
		after(time.Minute)
		b.silent[prefix(2)] = true
		cut := time.Now()
		after(690 * time.Millisecond)
		after(300*time.Millisecond, 2)
		if took := b.since.Sub(cut); took < 690*time.Millisecond || took > 900*time.Millisecond {
			t.Errorf("dead after %v, want within 700 to 900 ms", took)
		}
		if got := b.prober.States(); len(got) != 2 || !got[0].Alive || got[1].Alive || got[1].Node != "c" ||
			got[1].Answered.After(cut) || got[1].Answered.IsZero() {
			t.Errorf("states %+v", got)
		}
		delete(b.silent, prefix(2))
		after(210 * time.Millisecond)
	})
	run("one never answers", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		b.silent[prefix(2)] = true
		set(b, []byte{1, 2})
		after(0)
		after(110*time.Millisecond, 2)
		after(time.Minute, 2)
	})
	run("one has the rules of one tenant only", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		b.without[key{prefix(2), 2}] = true
		set(b, []byte{1, 2}, []byte{1, 2})
		b.rules[1].Tenant, b.rules[1].IDs = "red", []address.TenantID{2, 3}
		after(210*time.Millisecond, 2)
		for id := range address.TenantID(4) {
			if b.deadTo[key{prefix(2), id}] != (id == 2) {
				t.Errorf("dead for tenant ids %v, want 2", b.deadTo)
			}
		}
		if got := b.prober.States(); len(got) != 4 || !got[2].Alive || got[2].Tenant != "blue" || got[3].Alive ||
			got[3].Tenant != "red" || !got[3].Answered.IsZero() {
			t.Errorf("states %+v", got)
		}
		delete(b.without, key{prefix(2), 2})
		after(210 * time.Millisecond)
	})
	run("one is added to a rule", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		set(b, []byte{1})
		after(time.Second)
		b.silent[prefix(2)] = true
		set(b, []byte{1, 2})
		after(0, 2)
		delete(b.silent, prefix(2))
		after(210 * time.Millisecond)
	})
	run("all are silent", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		set(b, []byte{1, 2}, []byte{3})
		after(time.Second)
		b.silent[prefix(1)], b.silent[prefix(2)], b.silent[prefix(3)] = true, true, true
		after(time.Minute)
		delete(b.silent, prefix(1))
		after(210*time.Millisecond, 2)
		b.silent[prefix(1)] = true
		after(time.Second)
	})
	run("several rules", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		b.silent[prefix(1)] = true
		set(b, []byte{1}, []byte{1, own}, []byte{2, 3})
		after(time.Second, 1)
		set(b, []byte{1})
		after(time.Second)
	})
	run("a dead one leaves the rules", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		b.silent[prefix(1)] = true
		set(b, []byte{1, 2})
		after(time.Second, 1)
		set(b, []byte{2})
		after(time.Second)
	})
	run("an agent that restarts", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		b.dead[prefix(1)], b.silent[prefix(1)] = true, true
		set(b, []byte{1, 2})
		for range 20 {
			after(100*time.Millisecond, 1)
		}
		delete(b.silent, prefix(1))
		after(210 * time.Millisecond)
	})
	run("the agent did not run for a time", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		set(b, []byte{1, 2})
		after(time.Second)
		for at := range b.answered {
			b.answered[at] = b.answered[at].Add(-time.Minute)
		}
		after(500 * time.Millisecond)
	})
	first = of([]byte{1, 2})
	run("an agent that starts with rules", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		b.silent[prefix(1)], b.silent[prefix(2)] = true, true
		after(150 * time.Millisecond)
		delete(b.silent, prefix(1))
		after(490 * time.Millisecond) // the state of an earlier agent counts until it is known
		after(300*time.Millisecond, 2)
	})
	first = nil
	run("probes that cannot be sent", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		set(b, []byte{1, own})
		after(time.Second)
		b.fail = errors.New("no route")
		after(time.Second, 1)
	})
}
