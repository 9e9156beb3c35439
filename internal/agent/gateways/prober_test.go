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

	"pilaster.io/pilaster/internal/tenant"
)

// bed is a node with egress rules, and its packet path.
type bed struct {
	rules    [][]tenant.EgressGateway
	changed  chan struct{}
	prober   *Prober
	sent     map[netip.Prefix]int
	silent   map[netip.Prefix]bool
	answered map[netip.Prefix]time.Time
	dead     map[netip.Prefix]bool
	written  int
	since    time.Time // of the last write
	fail     error
}

func (b *bed) EgressGateways() [][]tenant.EgressGateway { return b.rules }
func (b *bed) GatewaysChanged() <-chan struct{}         { return b.changed }

func (b *bed) ProbeGateway(node netip.Prefix) error {
	b.sent[node]++
	if !b.silent[node] && b.fail == nil {
		b.answered[node] = time.Now()
	}
	return b.fail
}

func (b *bed) GatewayAnswered(node netip.Prefix) (time.Duration, bool, error) {
	at, ok := b.answered[node]
	return time.Since(at), ok, nil
}

func (b *bed) SetGatewayAlive(node netip.Prefix, alive bool) error {
	b.dead[node], b.since = !alive, time.Now()
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
	run := func(name string, test func(t *testing.T, b *bed, after func(time.Duration, ...byte))) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := &bed{
					changed: make(chan struct{}, 1), sent: map[netip.Prefix]int{}, silent: map[netip.Prefix]bool{},
					answered: map[netip.Prefix]time.Time{}, dead: map[netip.Prefix]bool{},
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
	set := func(b *bed, rules ...[]byte) {
		b.rules = nil
		for _, rule := range rules {
			var all []tenant.EgressGateway
			for _, n := range rule {
				all = append(all, gatewayOf(n))
			}
			b.rules = append(b.rules, all)
		}
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
		if b.written != 2 {
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
		got := b.prober.States()
		if len(got) != 2 || !got[0].Alive || got[1].Alive || got[1].Node != "c" ||
			got[1].Answered.After(cut) || got[1].Answered.IsZero() {
			t.Errorf("states %+v", got)
		}
		if !got[1].Silent || got[1].Only {
			t.Errorf("states %+v: the rule has another gateway", got)
		}
		set(b, []byte{1, 2}, []byte{2})
		if got := b.prober.States(); !got[1].Only || got[0].Only {
			t.Errorf("states %+v: a rule has the silent gateway alone", got)
		}
		set(b, []byte{1, 2})
		delete(b.silent, prefix(2))
		after(210 * time.Millisecond)
	})
	run("one never answers", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		b.silent[prefix(2)] = true
		set(b, []byte{1, 2})
		after(690 * time.Millisecond)
		after(300*time.Millisecond, 2)
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
	run("probes that cannot be sent", func(t *testing.T, b *bed, after func(time.Duration, ...byte)) {
		set(b, []byte{1, own})
		after(time.Second)
		b.fail = errors.New("no route")
		after(time.Second, 1)
	})
}
